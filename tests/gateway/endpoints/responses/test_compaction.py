"""Compaction of conversations: the summary that the model writes, and its way back into a prompt."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gateway.core.native_requests import RESPONSES
from gateway.endpoints.responses.compaction import PATH, REQUEST
from gateway.endpoints.responses.summaries import INTRODUCTION, decode_summary, encode_summary
from tests.gateway.endpoints.stored_routes import native
from tests.gateway.harness import Client, Rig, a_rig, answer
from tests.openai_spec import Validate

STORED = {"keep": "30d"}
CALL = {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"}
OUTPUT = {"type": "function_call_output", "call_id": "c1", "output": "there"}
ITEMS: list[Any] = [
    {"role": "user", "content": "Where is it?"},
    {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "Hm."}], "summary": []},
    CALL,
    OUTPUT,
    {"role": "assistant", "content": "There."},
    {"role": "user", "content": [{"type": "input_text", "text": "And this?"}]},
]


async def post(rig: Rig, path: str, input: Any = None, **fields: Any) -> Client:
    given = {"model": "m", **({} if input is None else {"input": input}), **fields}
    return await rig.ask(Client(json.dumps(given).encode(), path=f"/v1/{path}"))


def messages(rig: Rig) -> list[Any]:
    return list(json.loads(bytes(rig.last_call.fields["messages"])))


async def test_a_conversation_becomes_the_user_s_messages_and_a_summary(tmp_path: Path, validate: Validate) -> None:
    async with a_rig(tmp_path) as rig:
        rig.script(answer("They look for a box."))
        client = await post(rig, PATH, ITEMS, instructions="Be brief.")
        assert client.status == 200, client.content
        compacted = client.json
        validate("CompactResource", compacted)
        first, second, compaction = compacted["output"]
        assert (first["role"], second["role"], compaction["type"]) == ("user", "user", "compaction")
        assert (first["content"][0]["text"], second["content"][0]["text"]) == ("Where is it?", "And this?")
        assert compacted["usage"]["output_tokens"] == 2
        sent = messages(rig)
        assert (sent[0]["content"], sent[-1]["content"]) == ("Be brief.", REQUEST)
        roles = ["system", "user", "assistant", "tool", "assistant", "user", "user"]
        assert [message["role"] for message in sent] == roles
        (receipt,) = rig.receipts()
        assert receipt["outcome"] == "complete" and receipt["output"] == 2
        rig.script(answer("Yes."))
        again = await post(rig, "responses", [*compacted["output"], {"role": "user", "content": "What else?"}])
        assert again.status == 200, again.content
        assert [message["content"] for message in messages(rig)] == [
            "Where is it?", "And this?", f"{INTRODUCTION}They look for a box.", "What else?",
        ]  # fmt: skip


async def test_a_text_and_a_stored_response_are_compacted(tmp_path: Path) -> None:
    async with a_rig(tmp_path, responses=STORED) as rig:
        rig.script(answer("hi"))
        name = (await post(rig, "responses", "hello")).json["id"]
        for input, expected in ((None, ["hello"]), ("more", ["hello", "more"])):
            client = await post(rig, PATH, input, previous_response_id=name)
            *kept, compaction = client.json["output"]
            assert [item["content"][0]["text"] for item in kept] == expected
            assert decode_summary(compaction["encrypted_content"]) == "hi"
            assert messages(rig)[1] == {"role": "assistant", "content": "hi"}
        assert await rig.storage.get_document("t", client.json["id"]) is None, "a compaction is not stored"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "input"),
        ({"input": []}, "input"),
        ({"input": "x", "tools": []}, "tools"),
        ({"input": "x", "stream": True}, "stream"),
        ({"input": [{"type": "mcp_call"}]}, "input[0].type"),
        ({"input": "x", "previous_response_id": "resp_1"}, "previous_response_id"),
    ],
)
async def test_an_invalid_request_is_rejected_by_name(tmp_path: Path, fields: dict[str, Any], param: str) -> None:
    async with a_rig(tmp_path) as rig:
        client = await post(rig, PATH, **fields)
        assert (client.status, client.json["error"]["param"]) == (400, param)


async def test_an_answer_without_a_summary_is_an_error(tmp_path: Path) -> None:
    async with a_rig(tmp_path) as rig:
        rig.script(answer("  "))
        client = await post(rig, PATH, "x")
        assert (client.status, client.json["error"]["code"]) == (502, "upstream_cut")


async def test_a_deployment_with_the_api_gets_the_client_s_request(tmp_path: Path) -> None:
    async with a_rig(tmp_path, **native("responses")) as rig:
        rig.script(answer("hi"))
        await post(rig, PATH, ITEMS, instructions="Be brief.")
        request = rig.last_call.native
        assert request is not None and (request.api, request.path) == (RESPONSES, PATH)
        assert json.loads(bytes(request.fields["input"])) == ITEMS and set(request.fields) == {
            "model", "input", "instructions",
        }  # fmt: skip
        assert request.with_output_limit(5) is request


def test_summaries_survive_their_encoding_and_foreign_ones_are_refused() -> None:
    assert decode_summary(encode_summary("é\n")) == "é\n"
    for foreign in ("", "gAAAA", "wpc1.%%%", "wp1.e30="):
        assert decode_summary(foreign) is None


async def test_a_foreign_compaction_is_rejected_by_name(tmp_path: Path) -> None:
    async with a_rig(tmp_path) as rig:
        client = await post(rig, "responses", [{"type": "compaction", "encrypted_content": "gAAAA"}])
        assert (client.status, client.json["error"]["param"]) == (400, "input[0].encrypted_content")
