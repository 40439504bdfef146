"""Every way in which a request can end, with real components and scripted deployments (`tests.gateway.harness`).

`a_rig` checks at the end of each test that nothing is held and no task is left.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from gateway.endpoints import wire
from gateway.providers.base import Fault, ProviderFailure
from gateway.types import Operation, Outcome
from tests.gateway.harness import (
    DONE,
    Client,
    a_rig,
    answer,
    chat,
    cut,
    delta,
    in_time,
    last_event,
    outcomes,
    policy_of,
    settle,
    tenant,
    usage_frame,
)

STREAM = chat(stream=True)
DEEP = b'{"a":' * 100_000 + b"1" + b"}" * 100_000  # too deep for any reader


# Answers that come to their end


async def test_a_stream_is_passed_on_byte_for_byte(tmp_path: Path) -> None:
    async with a_rig(tmp_path) as rig:
        rig.script(b": ping\n\n", delta("one"), delta("two"), usage_frame(10, 2), DONE)
        client = await rig.ask(chat(stream=True, stream_options={"include_usage": True}))
        assert client.status == 200 and client.whole
        assert client.headers["content-type"].startswith("text/event-stream")
        assert client.content == b"".join([b": ping\n\n", delta("one"), delta("two"), usage_frame(10, 2), DONE])
        (receipt,) = rig.receipts()
        assert receipt["outcome"] == "complete" and receipt["exact"] and receipt["output"] == 2
        assert client.headers["x-request-id"] == receipt["call_id"]
        assert client.headers["x-warmpath-deployment"] == receipt["deployment"]


async def test_the_deployment_learns_from_the_usage_before_the_call_leaves_it(tmp_path: Path) -> None:
    """Its times are of use only with its tokens."""
    async with a_rig(tmp_path) as rig:
        rig.script(delta("one"), delta("two"), usage_frame(10, 7), DONE)
        await rig.ask(chat(stream=True, stream_options={"include_usage": True}))
        learned = {deployment.estimate.decode.mean_output_tokens for deployment in rig.fleet}
        assert max(learned) == 7


async def test_usage_that_was_not_asked_for_is_metered_and_left_out(tmp_path: Path) -> None:
    async with a_rig(tmp_path) as rig:
        rig.script(delta("one"), usage_frame(10, 7), DONE)
        client = await rig.ask(STREAM)
        assert client.content == delta("one") + DONE
        assert rig.receipts()[0]["output"] == 7


async def test_the_end_of_the_reply_is_not_taken_for_the_clients_leaving(tmp_path: Path) -> None:
    async with a_rig(tmp_path) as rig:
        serving = rig.begin(Client(STREAM))
        reply = await rig.reply()
        reply.slow_to_close = asyncio.Event()
        reply.say(DONE)
        await settle()
        assert not serving.done()
        reply.slow_to_close.set()
        await in_time(serving)
        assert not serving.cancelled() and rig.telemetry.records[0].outcome is Outcome.COMPLETE


async def test_a_json_answer_has_its_length(tmp_path: Path) -> None:
    async with a_rig(tmp_path) as rig:
        rig.script(answer())
        client = await rig.ask(chat())
        assert (client.status, client.content, client.headers["content-type"]) == (200, answer(), "application/json")
        assert client.headers["content-length"] == str(len(answer()))
        assert outcomes(rig) == ["complete"]


async def test_embeddings(tmp_path: Path) -> None:
    async with a_rig(tmp_path) as rig:
        vectors = json.dumps({"data": [], "usage": {"prompt_tokens": 3, "total_tokens": 3}}).encode()
        rig.script(vectors)
        client = await rig.ask(b'{"model": "m", "input": "text", "stream": true}', Operation.EMBEDDING)
        assert (client.status, client.content) == (200, vectors)
        (receipt,) = rig.receipts()
        assert (receipt["input_uncached"], receipt["output"], receipt["cost"]) == (3, 0, "0.000003")
        assert (receipt["operation"], receipt["outcome"], receipt["exact"]) == ("embeddings", "complete", True)


# Rejections before any upstream request


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        (b"", 400, None),
        (b"[]", 400, None),
        (b'{"model": "m", "messages": "\xff"}', 400, None),
        (b"{" * 9000, 400, None),
        (chat(max_tokens="many"), 400, "max_tokens"),
        (chat(max_tokens=2**31), 400, "max_tokens"),
        (chat(model="nobody"), 404, "model"),
        (chat(x="x" * 10_000), 413, None),
    ],
)
async def test_what_can_not_be_served_is_refused_by_name(
    tmp_path: Path, body: bytes, status: int, param: str | None
) -> None:
    async with a_rig(tmp_path) as rig:
        client = await rig.ask(body)
        error = client.json["error"]
        assert (client.status, error["param"]) == (status, param)
        assert error.keys() == {"message", "type", "param", "code"}
        assert client.headers["x-should-retry"] == "false" and client.headers["x-request-id"]
        assert rig.replies == [] and rig.receipts() == []


@pytest.mark.parametrize("kind", [b"application/x-www-form-urlencoded", b"text/plain", b"multipart/form-data", None])
async def test_a_body_is_what_it_is_and_not_what_it_is_called(tmp_path: Path, kind: bytes | None) -> None:
    """As of `curl -d`, which calls everything a form."""
    headers = [] if kind is None else [(b"content-type", kind)]
    async with a_rig(tmp_path) as rig:
        rig.script(answer("hi"))
        assert (await rig.ask(Client(chat(), headers=headers))).status == 200
        form = await rig.ask(Client(b"model=m&messages=hello", headers=headers))
        assert form.status == 400 and "not valid JSON" in form.json["error"]["message"]


async def test_content_parts_of_no_known_form_are_left_to_the_server(tmp_path: Path) -> None:
    async with a_rig(tmp_path) as rig:
        rig.script(answer())
        client = await rig.ask(json.dumps({"model": "m", "messages": [{"role": "user", "content": ["text"]}]}).encode())
        assert client.status == 200


async def test_a_wrong_key_is_refused_before_the_body_is_read(tmp_path: Path) -> None:
    async with a_rig(tmp_path) as rig:
        client = await rig.ask(Client([None], key="wp-dev-wrong"))
        assert client.status == 401


async def test_a_limit_refuses_and_says_when_to_come_back(tmp_path: Path) -> None:
    async with a_rig(tmp_path, tenants=[tenant(requests="1/1m")]) as rig:
        rig.script(answer())
        assert (await rig.ask(chat())).headers["x-ratelimit-remaining-requests"] == "0"
        client = await rig.ask(chat())
        assert client.status == 429 and client.headers["x-should-retry"] == "true"
        assert int(client.headers["retry-after-ms"]) > 0
        assert [row["kind"] for row in rig.rows()] == ["opened", "receipt"]  # of the first one; a refusal leaves none


async def test_a_call_that_no_server_has_a_place_for_is_turned_away(tmp_path: Path) -> None:
    async with a_rig(tmp_path, classes={"realtime": {"max_queue": 0}}) as rig:
        waiting = [rig.begin(Client(STREAM)) for _ in range(4)]
        await rig.reply(3)
        client = await rig.ask(STREAM)
        assert client.status == 503 and client.json["error"]["code"] == "overloaded"
        for reply in rig.replies:
            reply.say(DONE)
        await asyncio.gather(*waiting)
        assert len(rig.receipts()) == 4


# The body


async def test_a_body_that_does_not_arrive_ends_the_connection(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "STALL_SECONDS", 0.02)
    async with a_rig(tmp_path) as rig:
        for begun in ([b'{"model":', None], [None]):
            client = await rig.ask(Client(begun))
            assert client.status == 408 and client.json["error"]["code"] == "request_timeout"
            assert client.headers["connection"] == "close"


async def test_a_client_that_leaves_within_its_body_is_not_answered(tmp_path: Path) -> None:
    async with a_rig(tmp_path) as rig:
        client = Client([b'{"model":', None])
        serving = rig.begin(client)
        await settle()
        client.leave()
        await in_time(serving)
        assert client.status == 0
        assert rig.telemetry.records[0].status == 499 and rig.telemetry.records[0].outcome is Outcome.CLIENT_GONE


@pytest.mark.parametrize("headers", [[], [(b"authorization", b"Bearer nobody")]])
async def test_an_announced_body_over_the_cap_is_refused_unread_whoever_sends_it(
    tmp_path: Path, headers: list[tuple[bytes, bytes]]
) -> None:
    async with a_rig(tmp_path) as rig:
        client = Client([b"x" * 20_000], headers=[(b"content-length", b"20000"), *headers])
        assert (await rig.ask(client)).status == 413
        assert client._body != []


# Servers that fail


async def test_failover_until_the_first_chunk_and_one_receipt_for_all_attempts(tmp_path: Path) -> None:
    async with a_rig(tmp_path) as rig:
        for name in ("a", "b"):
            rig.servers[name].script = (cut(),)
        rig.servers["c"].script = (delta("from c"), DONE)
        client = await rig.ask(STREAM)
        assert client.status == 200 and client.headers["x-warmpath-deployment"] == "c"
        (receipt,) = rig.receipts()
        assert [attempt["outcome"] for attempt in receipt["attempts"]] == ["cut", "cut", "ok"]
        assert receipt["model_served"] == "served-by-c"


async def test_when_nobody_answers_the_attempts_are_told(tmp_path: Path) -> None:
    async with a_rig(tmp_path) as rig:
        rig.script(ProviderFailure(Fault.CONNECT, "refused"))
        client = await rig.ask(STREAM)
        assert client.status == 502
        assert [attempt["outcome"] for attempt in client.json["error"]["attempts"]] == ["connect_error"] * 4
        (receipt,) = rig.receipts()
        assert (receipt["outcome"], receipt["cost"]) == ("refused", "0")


@pytest.mark.parametrize("failure", [cut(), None, b'data: {"error": {"message": "out of memory"}}\n\n'])
async def test_a_failure_after_the_first_byte_is_told_in_the_stream(
    tmp_path: Path, failure: bytes | Exception | None
) -> None:
    async with a_rig(tmp_path) as rig:
        rig.script(delta("one"), failure)
        client = await rig.ask(STREAM)
        assert client.status == 200 and client.whole and DONE not in client.content
        assert client.content.startswith(delta("one"))
        assert last_event(client)["error"]["code"] == "upstream_cut"
        assert outcomes(rig) == ["upstream_cut"]


@pytest.mark.parametrize(
    "body",
    [b'{"choices": [', b'{"error": {"message": "no"}}', b'{"choices": 7}', pytest.param(DEEP, id="too deep")],
)
async def test_a_json_answer_that_is_none_is_not_passed_on(tmp_path: Path, body: bytes) -> None:
    async with a_rig(tmp_path) as rig:
        rig.script(body, None)
        client = await rig.ask(chat())
        assert client.status == 502 and client.json["error"]["code"] == "upstream_cut"
        assert outcomes(rig) == ["upstream_cut"]


async def test_a_server_that_says_nothing_for_too_long(tmp_path: Path) -> None:
    classes = {"realtime": {"inter_token": "0.02s"}}
    async with a_rig(tmp_path, classes=classes) as rig:
        rig.script(delta("one"))
        client = await rig.ask(STREAM)
        assert last_event(client)["error"]["code"] == "upstream_cut"
        assert outcomes(rig) == ["timeout"]
        assert rig.receipts()[0]["attempts"][0]["outcome"] == "timeout"


async def test_the_servers_own_refusal_is_the_clients(tmp_path: Path) -> None:
    async with a_rig(tmp_path) as rig:
        words = b'{"error": {"message": "too long"}}'
        rig.script(ProviderFailure(Fault.REFUSED, "", status=422, body=words))
        client = await rig.ask(chat())
        assert (client.status, client.content) == (422, words)
        assert len(rig.replies) == 1  # no other deployment got a request


async def test_a_page_of_the_servers_is_not_shown_as_ours(tmp_path: Path) -> None:
    async with a_rig(tmp_path) as rig:
        page = b"<script>alert(1)</script>"
        rig.script(ProviderFailure(Fault.REFUSED, "", status=400, body=page, content_type="text/html\r\nx: y"))
        client = await rig.ask(chat())
        assert (client.status, client.headers["content-type"]) == (400, "application/json")
        assert page.decode() in client.json["error"]["message"]


async def test_a_bug_leaves_no_trace_with_the_client_and_one_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with a_rig(tmp_path, tenants=[tenant(concurrency=1)]) as rig:
        rig.script(ZeroDivisionError("a bug"))
        client = await rig.ask(STREAM)
        assert client.status == 500 and client.json["error"]["code"] == "internal_error"
        assert "a bug" not in client.content.decode() and "a bug" in caplog.text
        assert rig.receipts()[0]["attempts"][0]["outcome"] == "given_up"


# A policy that changes


async def test_a_call_in_flight_keeps_its_server_and_one_that_waits_takes_a_new_one(tmp_path: Path) -> None:
    few = policy_of()["deployments"]
    for deployment in few:
        deployment["max_concurrency"] = 1
    models = [{"name": "m", "deployments": ["a"]}]
    async with a_rig(tmp_path, deployments=few, models=models) as rig:
        first, second = Client(STREAM), Client(STREAM)
        serving = [rig.begin(first)]
        old = await rig.reply()
        serving.append(rig.begin(second))
        await settle()
        before = list(rig.fleet)
        rig.write_policy(policy_of(deployments=few[1:], models=[{"name": "m", "deployments": ["b", "c"]}]))
        assert await rig.components.policies.reload()
        await settle()
        assert second.whole and second.status == 503 and "no deployment" in second.json["error"]["message"]
        old.say(delta("one"), DONE)
        await in_time(asyncio.gather(*serving))
        assert first.content == delta("one") + DONE
        assert all(server.slots_taken == 0 for server in before)
        rig.script(DONE)
        assert (await rig.ask(STREAM)).headers["x-warmpath-deployment"] in "bc"
