"""Responses in the background, with real components and scripted deployments. Two services stand for two gateways.

`test_lost_gateways.py` has what happens to them when a gateway or the storage is lost.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from gateway.endpoints.responses import ResponsesEndpoint
from gateway.endpoints.responses.stored import NO_HISTORY, StoredTurn, document_of
from gateway.serve import handle, serve
from tests.gateway.background.rig import (
    STREAM,
    asking,
    begin,
    call,
    create,
    polled,
    stored_rig,
    streamed,
    text_of,
)
from tests.gateway.endpoints.responses.translated import check_response, events_of
from tests.gateway.endpoints.stored_routes import OTHER, OTHER_KEY
from tests.gateway.harness import (
    DONE,
    Client,
    a_rig,
    cut,
    delta,
    in_time,
    outcomes,
    settle,
    tenant,
    usage_frame,
)
from tests.openai_spec import Validate


async def test_a_response_is_queued_then_polled_until_it_is_complete(tmp_path: Path, validate: Validate) -> None:
    async with stored_rig(tmp_path) as rig:
        queued = await create(rig, metadata={"a": "b"})
        assert (queued["status"], queued["background"], queued["store"], queued["output"]) == (
            "queued", True, True, [],
        )  # fmt: skip
        check_response(validate, queued)
        reply = await rig.reply()
        running = await polled(rig, queued["id"], "in_progress")
        check_response(validate, running)
        reply.say(*STREAM)
        response = await polled(rig, queued["id"])
        check_response(validate, response)
        assert (response["status"], text_of(response), response["background"]) == ("completed", "one two", True)
        assert response["metadata"] == {"a": "b"} and response["usage"]["output_tokens"] == 2
        assert [item["content"] for item in (await call(rig, "GET", f"{queued['id']}/input_items")).json["data"]]
        await settle()
        assert outcomes(rig) == ["complete"]
        assert rig.receipts()[0]["call_id"] == queued["id"].replace("resp_", "req_")


async def test_it_can_be_continued_when_it_is_complete_and_not_before(tmp_path: Path) -> None:
    async with stored_rig(tmp_path) as rig:
        name = (await create(rig))["id"]
        reply = await rig.reply()
        early = Client(json.dumps({"model": "m", "input": "x", "previous_response_id": name}).encode())
        early.scope["path"] = "/v1/responses"
        await rig.ask(early)
        assert early.status == 400 and "so it cannot be continued" in early.json["error"]["message"]
        reply.say(*STREAM)
        await polled(rig, name)
        again = await create(rig, previous_response_id=name)
        (await rig.reply(1)).say(*STREAM)
        assert (await polled(rig, again["id"]))["status"] == "completed"
        messages = json.loads(bytes(rig.last_call.fields["messages"]))
        assert [message["content"] for message in messages] == ["hello", "one two", "hello"]


async def test_its_stream_has_all_events_and_survives_the_client(tmp_path: Path, validate: Validate) -> None:
    async with stored_rig(tmp_path) as rig:
        client = Client(asking(stream=True), path="/v1/responses")
        task = rig.begin(client)
        reply = await rig.reply()
        reply.say(delta("one "))
        await client.first_bytes.wait()
        while b"one " not in client.content:
            await asyncio.sleep(0)
        client.leave()
        await in_time(task)
        reply.say(delta("two"), usage_frame(), DONE)
        first = json.loads(client.content.partition(b"data: ")[2].partition(b"\n")[0])["response"]
        response = await polled(rig, first["id"])
        assert (response["status"], text_of(response)) == ("completed", "one two")
        events = await streamed(rig, first["id"])
        kinds = [event["type"].removeprefix("response.") for event in events]
        assert kinds[:3] == ["created", "queued", "in_progress"] and kinds[-1] == "completed"
        assert [event["response"]["status"] for event in events[:3]] == ["queued", "queued", "in_progress"]
        assert [event["sequence_number"] for event in events] == [*range(len(events))]
        for event in events:
            validate("ResponseStreamEvent", event)
        assert events[-1]["response"] == response
        for after in (0, 3, len(events) - 2, len(events) - 1):
            assert await streamed(rig, first["id"], after) == events[after + 1 :]
        await settle()
        assert outcomes(rig) == ["complete"]


async def test_the_first_client_gets_the_whole_stream(tmp_path: Path) -> None:
    async with stored_rig(tmp_path) as rig:
        rig.script(*STREAM)
        client = await rig.ask(Client(asking(stream=True), path="/v1/responses"))
        events = events_of(client.content)
        assert events[-1]["type"] == "response.completed" and text_of(events[-1]["response"]) == "one two"


@pytest.mark.parametrize("elsewhere", [False, True])
async def test_a_stream_is_followed_while_it_runs(tmp_path: Path, elsewhere: bool) -> None:
    async with stored_rig(tmp_path) as rig:
        service = rig.another_background() if elsewhere else None
        name = (await create(rig))["id"]
        reply = await rig.reply()
        follower_client = Client(method="GET", path=f"/v1/responses/{name}")
        task = begin(rig, follower_client, "stream=true&starting_after=1", service)
        for word in ("one ", "two"):
            reply.say(delta(word))
            for _ in range(1000):
                if word.encode() in follower_client.content:
                    break
                await asyncio.sleep(0.01)
            assert word.encode() in follower_client.content, "events arrive while the response is in progress"
        reply.say(usage_frame(), DONE)
        await in_time(task)
        assert follower_client.content.startswith(b"event: response.in_progress")
        assert b"event: response.completed" in follower_client.content


@pytest.mark.parametrize("elsewhere", [False, True])
async def test_a_cancelled_response_stops_and_has_one_receipt(
    tmp_path: Path, elsewhere: bool, validate: Validate
) -> None:
    async with stored_rig(tmp_path) as rig:
        service = rig.another_background() if elsewhere else None
        name = (await create(rig))["id"]
        reply = await rig.reply()
        reply.say(delta("one "))
        while b"one " not in b"".join(rig.background._runs[name].log.since(0)):
            await asyncio.sleep(0)
        cancelled = await call(rig, "POST", f"{name}/cancel", service=service)
        assert (cancelled.status, cancelled.json["status"], text_of(cancelled.json)) == (200, "cancelled", "one ")
        check_response(validate, cancelled.json)
        again = await call(rig, "POST", f"{name}/cancel", service=service)
        assert again.json == cancelled.json == (await call(rig, "GET", name)).json
        await in_time(rig.background.close(drain_seconds=5.0))
        assert reply.closed and outcomes(rig) == ["client_gone"]
        events = await streamed(rig, name, service=service)
        assert events[-1]["type"] == "response.output_text.delta", "the stream of a cancelled response just ends"


async def test_a_queued_response_can_be_cancelled_and_costs_nothing(tmp_path: Path) -> None:
    async with stored_rig(tmp_path) as rig:
        names = [(await create(rig))["id"] for _ in range(6)]  # the model has four slots
        await settle()
        assert len(rig.replies) == 4
        cancelled = await call(rig, "POST", f"{names[-1]}/cancel")
        assert cancelled.json["status"] == "cancelled"
        for reply in rig.replies:
            reply.say(*STREAM)
        await rig.reply(4)
        max(rig.replies, key=lambda reply: reply.number).say(*STREAM)
        assert [(await polled(rig, name))["status"] for name in names] == ["completed"] * 5 + ["cancelled"]
        await settle()
        assert outcomes(rig) == ["complete"] * 5


async def test_a_failed_response_is_stored_with_its_error(tmp_path: Path, validate: Validate) -> None:
    async with stored_rig(tmp_path) as rig:
        rig.script(delta("one "), cut())
        response = await polled(rig, (await create(rig))["id"])
        check_response(validate, response)
        assert (response["status"], response["error"]["code"]) == ("failed", "server_error")
        assert text_of(response).startswith("one ") and response["output"][0]["status"] == "incomplete"
        events = await streamed(rig, response["id"])
        assert events[-1]["type"] == "response.failed" and len(outcomes(rig)) == 1


async def test_a_response_that_no_deployment_begins_has_failed(tmp_path: Path) -> None:
    async with stored_rig(tmp_path) as rig:
        rig.script(cut())
        response = await polled(rig, (await create(rig))["id"])
        assert (response["status"], response["output"]) == ("failed", [])
        kinds = [event["type"] for event in await streamed(rig, response["id"])]
        assert kinds == [f"response.{kind}" for kind in ("created", "queued", "in_progress", "failed")]


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"model": "none"}, 404, "model"),
        ({"temperature": "hot"}, 400, "temperature"),
        ({"store": False}, 400, "store"),
        ({"stream": "yes"}, 400, "stream"),
        ({"background": "yes"}, 400, "background"),
        ({"previous_response_id": "resp_none"}, 400, "previous_response_id"),
        ({"tools": [{"type": "mcp"}]}, 400, "tools[0].type"),
    ],
)
async def test_an_invalid_request_is_refused_at_once(
    tmp_path: Path, fields: dict[str, Any], status: int, param: str
) -> None:
    async with stored_rig(tmp_path) as rig:
        client = await rig.ask(Client(asking(**fields), path="/v1/responses"))
        assert (client.status, client.json["error"]["param"]) == (status, param)
        assert rig.background.running == 0 and not rig.receipts()


async def test_it_needs_stored_responses(tmp_path: Path) -> None:
    async with a_rig(tmp_path) as rig:
        client = await rig.ask(Client(asking(), path="/v1/responses"))
        assert (client.status, client.json["error"]["param"]) == (400, "background")


async def test_a_limit_is_reported_at_once(tmp_path: Path) -> None:
    async with stored_rig(tmp_path, tenants=[tenant(requests="1/1h")]) as rig:
        rig.script(*STREAM)
        await polled(rig, (await create(rig))["id"])
        client = await rig.ask(Client(asking(), path="/v1/responses"))
        assert (client.status, client.json["error"]["code"]) == (429, "rate_limit_exceeded")


@pytest.mark.parametrize("elsewhere", [False, True])
async def test_a_tenant_has_at_most_so_many_open(tmp_path: Path, elsewhere: bool) -> None:
    responses = {"keep": "30d", "background": {"max_open": 2}}
    async with stored_rig(tmp_path, responses, tenants=[tenant(), OTHER]) as rig:
        names = [(await create(rig))["id"] for _ in range(2)]
        second = rig.another_background() if elsewhere else rig.background
        first, rig.background = rig.background, second
        client = await rig.ask(Client(asking(), path="/v1/responses"))
        assert client.status == 429 and "2 responses of this tenant" in client.json["error"]["message"]
        others = await rig.ask(Client(asking(), path="/v1/responses", key=OTHER_KEY))
        assert others.status == 200, "each tenant has its own bound"
        await settle()
        for reply in rig.replies:
            reply.say(*STREAM)
        for name in names:
            await polled(rig, name)
        await in_time(first.close(drain_seconds=5.0))
        rig.script(*STREAM)
        await polled(rig, (await create(rig))["id"])


async def test_a_tenant_follows_at_most_so_many_streams(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.background.service.TENANT_FOLLOWERS_MAX", 1)
    async with stored_rig(tmp_path) as rig:
        name = (await create(rig))["id"]
        reply = await rig.reply()
        await polled(rig, name, "in_progress")
        client = Client(method="GET", path=f"/v1/responses/{name}")
        following = begin(rig, client, "stream=true")
        await in_time(client.first_bytes.wait())
        refused = await call(rig, "GET", name, "stream=true")
        assert (refused.status, refused.headers["retry-after"]) == (429, "1")
        reply.say(*STREAM)
        await in_time(following)
        assert (await streamed(rig, name))[-1]["type"] == "response.completed"


async def test_the_policy_s_time_bounds_it_whatever_its_class_says(tmp_path: Path) -> None:
    responses = {"keep": "30d", "background": {"max_time": "2h"}}
    async with stored_rig(tmp_path, responses) as rig:
        client = Client(asking(), path="/v1/responses", headers=[(b"x-stainless-read-timeout", b"1")])
        await rig.ask(client)
        reply = await rig.reply()
        limits = reply.call.latency_class
        assert (limits.total, limits.max_wait, reply.call.read_timeout_seconds) == (7200.0, 7200.0, float("inf"))
        reply.say(*STREAM)


async def test_a_response_that_is_too_long_to_be_stored_has_failed(tmp_path: Path) -> None:
    async with stored_rig(tmp_path, {"keep": "30d", "max_response_bytes": 2500}) as rig:
        rig.script(delta("x" * 3000), usage_frame(), DONE)
        response = await polled(rig, (await create(rig))["id"])
        assert response["status"] == "failed" and "the limit is 2500" in response["error"]["message"]
        refused = await rig.ask(Client(asking("x" * 3000), path="/v1/responses"))
        assert (refused.status, refused.json["error"]["param"]) == (400, "background")


async def test_events_beyond_the_bound_are_no_longer_stored(tmp_path: Path) -> None:
    responses = {"keep": "30d", "background": {"max_event_bytes": 4000}}
    async with stored_rig(tmp_path, responses) as rig:
        name = (await create(rig))["id"]
        reply = await rig.reply()
        for number in range(10):
            reply.say(delta(f"{number} " * 100))
            await asyncio.sleep(0.03)  # so that they are stored in several parts
        reply.say(usage_frame(), DONE)
        await polled(rig, name)
        refused = await call(rig, "GET", name, "stream=true")
        assert (refused.status, refused.json["error"]["param"]) == (400, "starting_after")


async def test_a_deleted_response_leaves_nothing(tmp_path: Path) -> None:
    async with stored_rig(tmp_path) as rig:
        name = (await create(rig))["id"]
        await rig.reply()
        assert (await call(rig, "DELETE", name)).json["deleted"]
        await in_time(rig.background.close(drain_seconds=5.0))
        assert (await call(rig, "GET", name)).status == 404
        assert await rig.storage.list_documents("events/t", name, limit=9) == []
        assert await rig.storage.get_document("t", name) is None


async def test_other_responses_cannot_be_cancelled_or_streamed_again(tmp_path: Path) -> None:
    async with stored_rig(tmp_path) as rig:
        rig.script(*STREAM)
        body = json.dumps({"model": "m", "input": "x", "stream": True}).encode()
        client = await rig.ask(Client(body, path="/v1/responses"))
        name = events_of(client.content)[0]["response"]["id"]
        cancelled = await call(rig, "POST", f"{name}/cancel")
        assert cancelled.status == 400 and "background: true" in cancelled.json["error"]["message"]
        assert (await call(rig, "GET", name, "stream=true")).json["error"]["param"] == "stream"


async def test_a_deployment_s_response_without_the_field_is_not_in_the_background(tmp_path: Path) -> None:
    async with stored_rig(tmp_path) as rig:
        document = document_of({"id": "resp_1", "status": "completed"}, StoredTurn(), NO_HISTORY)
        await rig.storage.put_document("t", "resp_1", document, ttl_seconds=60, max_bytes=1000)
        assert (await call(rig, "POST", "resp_1/cancel")).status == 400
        assert (await call(rig, "GET", "resp_1", "stream=true")).status == 400
        assert (await call(rig, "DELETE", "resp_1")).status == 200


async def test_another_tenant_sees_nothing(tmp_path: Path) -> None:
    async with stored_rig(tmp_path, tenants=[tenant(), OTHER]) as rig:
        name = (await create(rig))["id"]
        reply = await rig.reply()
        for method, path, query in (("GET", name, ""), ("GET", name, "stream=true"), ("POST", f"{name}/cancel", "")):
            assert (await call(rig, method, path, query, key=OTHER_KEY)).status == 404
        reply.say(*STREAM)
        assert (await polled(rig, name))["status"] == "completed"


async def test_an_idempotent_request_starts_one_run(tmp_path: Path) -> None:
    async with stored_rig(tmp_path) as rig:
        key = [(b"idempotency-key", b"k1")]
        clients = [await rig.ask(Client(asking(), path="/v1/responses", headers=key)) for _ in range(2)]
        assert clients[0].content == clients[1].content
        (await rig.reply()).say(*STREAM)
        await polled(rig, clients[0].json["id"])
        assert len(rig.replies) == 1


async def test_a_cached_answer_is_complete_at_once(tmp_path: Path) -> None:
    async with stored_rig(tmp_path) as rig:
        rig.script(*STREAM)
        first = await polled(rig, (await create(rig, temperature=0))["id"])
        await settle()
        second = await create(rig, temperature=0)
        assert (second["status"], text_of(second)) == ("completed", text_of(first)) and len(rig.replies) == 1


async def test_a_batch_line_cannot_run_in_the_background(tmp_path: Path) -> None:
    """Handlers that are not wrapped refuse it."""
    async with stored_rig(tmp_path) as rig:
        client = Client(asking(), path="/v1/responses")
        await in_time(
            handle(rig.components, ResponsesEndpoint(), client.scope, client.receive, client.send, story=serve)
        )
        assert (client.status, client.json["error"]["param"]) == (400, "background")
