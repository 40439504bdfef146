"""Item references, through the whole gateway."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gateway.core.api_keys import hash_key
from gateway.endpoints.responses import references
from gateway.endpoints.responses.stored import input_of
from tests.gateway.endpoints.responses.test_stored import (
    OTHER_KEY,
    STORED,
    client_of,
    message_of,
    prompt_of,
    respond,
)
from tests.gateway.endpoints.responses.translated import TOOL
from tests.gateway.harness import PEPPER, a_rig, answer, tenant


def reference_to(item: Any) -> dict[str, str]:
    return {"type": "item_reference", "id": item["id"]}


ANSWER = {
    "reasoning_content": "Hm.",
    "thinking_blocks": [{"type": "thinking", "thinking": "Hm.", "signature": "s1g"}],
    "content": "Let me look.",
    "tool_calls": [{"index": 0, "id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}],
}


@pytest.mark.parametrize("stream", [False, True])
async def test_a_reference_equals_the_item_itself(tmp_path: Path, stream: bool) -> None:
    async with a_rig(tmp_path, responses=STORED) as rig:
        rig.script(*message_of(ANSWER, stream=stream))
        include = ["reasoning.encrypted_content"]
        first = await respond(rig, "Where?", tools=[TOOL], include=include, stream=stream)
        rig.script(*message_of({"content": "There."}, stream=stream))
        question = {"role": "user", "content": "Where?"}
        output = {"type": "function_call_output", "call_id": "c1", "output": "there"}
        second = await respond(
            rig, [question, *map(reference_to, first["output"]), output], tools=[TOOL], stream=stream
        )
        by_reference = prompt_of(rig)
        await respond(rig, [question, *first["output"], output], tools=[TOOL], stream=stream)
        assert prompt_of(rig) == by_reference
        document = await rig.storage.get_document("t", second["id"])
        assert document is not None
        stored = [json.loads(item) for item in input_of(document)]
        assert [item["id"] for item in stored[1:4]] == [item["id"] for item in first["output"]], (
            "stored whole, under their ids"
        )
        again = {"role": "user", "content": "Again."}
        await respond(rig, [*map(reference_to, stored), again], stream=stream)  # input items have ids, too
        by_reference = prompt_of(rig)
        await respond(rig, [*stored, again], stream=stream)
        assert prompt_of(rig) == by_reference


async def test_a_history_combined_with_references(tmp_path: Path) -> None:
    async with a_rig(tmp_path, responses=STORED) as rig:
        rig.script(answer("hi"))
        first, second = await respond(rig, "one"), await respond(rig, "two")
        await respond(rig, [reference_to(second["output"][0])], previous_response_id=first["id"])
        messages = json.loads(prompt_of(rig)[0])
        assert [message["content"] for message in messages] == ["one", "hi", "hi"]


@pytest.mark.parametrize("name", ["msg_" + "0" * 26, "msg_mine", "", "x" * 500, "msg_" + "0" * 24, "resp_1"])
async def test_an_unknown_item_is_not_found(tmp_path: Path, name: str) -> None:
    async with a_rig(tmp_path, responses=STORED) as rig:
        client = await rig.ask(client_of([{"role": "user", "content": "x"}, {"type": "item_reference", "id": name}]))
        assert (client.status, client.json["error"]["param"]) == (404, "input[1].id")


async def test_an_item_of_another_tenant_is_not_found(tmp_path: Path) -> None:
    other = {"name": "other", "keys": [{"id": "other", "hash": hash_key(OTHER_KEY, PEPPER)}]}
    async with a_rig(tmp_path, responses=STORED, tenants=[tenant(), other]) as rig:
        rig.script(answer("hi"))
        item = (await respond(rig))["output"][0]
        assert (await rig.ask(client_of([reference_to(item)], key=OTHER_KEY))).status == 404
        assert (await rig.ask(client_of([reference_to(item)]))).status == 200


@pytest.mark.parametrize(
    ("item", "param"),
    [
        ({"type": "item_reference"}, "input[0].id"),
        ({"type": "item_reference", "id": 5}, "input[0].id"),
        ({"type": "item_reference", "id": "msg_1", "more": 1}, "input[0].more"),
        ("item_reference", "input[0]"),
        ({"role": "user", "content": [{"type": "item_reference"}]}, "input[0].content[0].type"),
    ],
)
async def test_an_invalid_reference_is_rejected_by_its_path(tmp_path: Path, item: Any, param: str) -> None:
    async with a_rig(tmp_path, responses=STORED) as rig:
        client = await rig.ask(client_of([item]))
        assert (client.status, client.json["error"]["param"]) == (400, param)


async def test_references_are_rejected_if_the_policy_stores_no_responses(tmp_path: Path) -> None:
    async with a_rig(tmp_path) as rig:
        client = await rig.ask(client_of([{"type": "item_reference", "id": "msg_1"}]))
        assert (
            client.status == 400
            and "responses are not stored here; send the item itself" in client.json["error"]["message"]
        )


async def test_a_text_may_contain_the_word_item_reference(tmp_path: Path) -> None:
    async with a_rig(tmp_path, responses=STORED) as rig:
        rig.script(answer("hi"))
        for text in ('"item_reference"', [{"role": "user", "content": '"item_reference"'}]):
            assert (await respond(rig, text))["store"]


async def test_references_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with a_rig(tmp_path, responses=STORED) as rig:
        rig.script(answer("hi"))
        items = [reference_to((await respond(rig))["output"][0]) for _ in range(3)]
        for bound in ("RESPONSES_MAX", "HISTORY_BYTES_MAX"):
            with monkeypatch.context() as patch:
                patch.setattr(references, bound, 2)
                client = await rig.ask(client_of(items))
                assert (client.status, client.json["error"]["param"]) == (400, "input")
        monkeypatch.setattr(references, "LOADED_AT_ONCE", 2)
        assert (await rig.ask(client_of(items))).status == 200
        rig.storage.documents_away = True
        client = await rig.ask(client_of(items))
        assert (client.status, client.headers["retry-after"]) == (503, "1")
