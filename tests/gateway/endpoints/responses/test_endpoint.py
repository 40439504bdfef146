"""The Responses API through the whole gateway, with scripted deployments that speak chat."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from gateway.batches.lines import ENDPOINTS
from gateway.core.errors import BudgetSpent, UpstreamRefused
from gateway.endpoints.responses import ResponsesEndpoint
from gateway.providers.base import Fault, ProviderFailure
from tests.gateway.endpoints.responses.translated import events_of, read
from tests.gateway.harness import (
    DONE,
    Client,
    a_rig,
    answer,
    chat,
    counted,
    cut,
    delta,
    in_time,
    settle,
    usage_frame,
)


def client_of(**fields: Any) -> Client:
    body = json.dumps({"model": "m", "input": "hello", **fields}).encode()
    return Client(body, path="/v1/responses")


async def test_a_whole_answer_is_a_response(tmp_path: Path) -> None:
    async with a_rig(tmp_path) as rig:
        rig.script(answer("hi"))
        client = await rig.ask(client_of(instructions="Be brief."))
        (reply,) = rig.replies
        assert json.loads(bytes(reply.call.fields["messages"]))[0] == {"role": "system", "content": "Be brief."}
        assert client.status == 200 and client.headers["content-type"] == "application/json"
        assert client.json["output"][0]["content"][0]["text"] == "hi"
        (receipt,) = rig.receipts()
        assert client.json["id"] == receipt["call_id"].replace("req_", "resp_")
        assert client.json["usage"]["total_tokens"] == counted()["total_tokens"]
        assert receipt["outcome"] == "complete" and receipt["output"] == client.json["usage"]["output_tokens"]


async def test_a_stream_is_relayed_as_it_arrives(tmp_path: Path) -> None:
    async with a_rig(tmp_path) as rig:
        client = client_of(stream=True)
        serving = rig.begin(client)
        reply = await rig.reply()
        reply.say(b": ping\n\n", delta("one"))
        await settle()
        assert client.content.startswith(b": keep-alive\n\nevent: response.created\n")
        assert (client.whole, b'"delta":"one"' in client.content) == (False, True)
        reply.say(delta("two"), usage_frame(10, 2), DONE)
        await in_time(serving)
        events = events_of(client.content)
        assert client.whole and events[-1]["type"] == "response.completed"
        assert events[-1]["response"]["output"][0]["content"][0]["text"] == "onetwo"
        assert events[-1]["response"]["usage"]["input_tokens"] == 10
        assert rig.receipts()[0]["exact"]


@pytest.mark.parametrize(
    "end",
    [cut(), None, b'data: {"error": {"message": "out of memory"}}\n\n', b"data: {\n\n", delta("x")[:-9] + b"5}\n\n"],
)
async def test_a_cut_answer_never_looks_complete(tmp_path: Path, end: Any) -> None:
    async with a_rig(tmp_path, classes={"realtime": {"continue_cut_streams": False}}) as rig:
        rig.script(delta("one"), end)
        client = await rig.ask(client_of(stream=True))
        events = events_of(client.content)
        assert events[-1]["type"] == "response.failed" and events[-1]["response"]["error"]["message"]
        assert events[-1]["response"]["output"][0]["content"][0]["text"] == "one"
        assert not any("completed" in event["type"] for event in events)
        assert rig.receipts()[0]["outcome"] == "upstream_cut"


async def test_an_invalid_whole_answer_is_an_error(tmp_path: Path) -> None:
    async with a_rig(tmp_path) as rig:
        rig.script(b'{"choices":[{"message":{"content":5}}]}')
        client = await rig.ask(client_of())
        assert client.status == 502 and client.json["error"]["code"] == "upstream_cut"


async def test_an_engines_rejection_names_the_clients_fields(tmp_path: Path) -> None:
    async with a_rig(tmp_path) as rig:
        rejection = {
            "error": {"message": "`max_tokens` is too much; so is max_tokens_x", "param": "max_tokens", "code": 7}
        }
        rig.script(ProviderFailure(Fault.REFUSED, "no", status=400, body=json.dumps(rejection).encode()))
        client = await rig.ask(client_of(max_output_tokens=9))
        error = {
            "message": "`max_output_tokens` is too much; so is max_tokens_x",
            "param": "max_output_tokens",
            "code": 7,
        }
        assert (client.status, client.json) == (400, {"error": error})


@pytest.mark.parametrize(
    "content",
    [
        b"a page",
        b"[]",
        b'{"error":"x"}',
        b'{"error":{"message":"x","param":null}}',
        pytest.param(b"[" * 9000, id="deep"),
    ],
)
def test_a_rejection_without_a_field_is_passed_unchanged(content: bytes) -> None:
    translator, _ = read()
    assert translator.error_response(UpstreamRefused(400, content, "application/json")) is None
    assert translator.error_response(BudgetSpent("no more")) is None


async def test_a_bad_request_is_rejected_before_any_upstream_request(tmp_path: Path) -> None:
    async with a_rig(tmp_path) as rig:
        client = await rig.ask(client_of(previous_response_id="resp_1"))
        assert client.status == 400 and client.json["error"]["param"] == "previous_response_id"
        assert not rig.replies and not rig.receipts()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_cached_answer_serves_both_endpoints(tmp_path: Path, stream: bool) -> None:
    async with a_rig(tmp_path) as rig:
        words = (delta("one"), usage_frame(), DONE) if stream else (answer("one"),)
        rig.script(*words)
        await rig.ask(chat(temperature=0, stream=stream))
        client = await rig.ask(client_of(temperature=0, stream=stream))
        assert client.headers["x-warmpath-cache"] == "hit" and len(rig.replies) == 1
        response = events_of(client.content)[-1]["response"] if stream else client.json
        assert response["output"][0]["content"][0]["text"] == "one"


async def test_equal_calls_in_flight_share_one_answer_and_each_has_its_own_events(tmp_path: Path) -> None:
    async with a_rig(tmp_path) as rig:
        clients = [client_of(temperature=0, stream=True) for _ in range(2)]
        serving = [rig.begin(client) for client in clients]
        reply = await rig.reply()
        await settle()
        reply.say(delta("one"), delta("two"), DONE)
        await in_time(asyncio.gather(*serving))
        assert len(rig.replies) == 1
        first, second = (events_of(client.content) for client in clients)
        assert [event["type"] for event in first] == [event["type"] for event in second]
        assert first[-1]["response"]["id"] != second[-1]["response"]["id"]


async def test_a_client_that_disconnects_is_billed_for_what_was_generated(tmp_path: Path) -> None:
    async with a_rig(tmp_path) as rig:
        client = client_of(stream=True)
        serving = rig.begin(client)
        (await rig.reply()).say(delta("one"), delta("two"))
        await settle()
        client.leave()
        await in_time(asyncio.wait([serving]))
        (receipt,) = rig.receipts()
        assert receipt["outcome"] == "client_gone" and receipt["output"] == 2


def test_the_lines_of_a_batch_may_be_responses() -> None:
    assert isinstance(ENDPOINTS["/v1/responses"], ResponsesEndpoint)
