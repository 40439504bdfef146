"""Reading and deleting stored responses by HTTP."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from openai.types import responses as sdk
from pydantic import TypeAdapter

from gateway.endpoints.stored_responses import StoredResponsesApi
from tests.gateway.endpoints.responses.translated import TOOL, check_response
from tests.gateway.endpoints.stored_routes import OTHER, OTHER_KEY, STORED, send
from tests.gateway.harness import Client, Rig, a_rig, answer, tenant
from tests.openai_spec import Validate

IMAGE = {"type": "input_image", "image_url": "data:image/png;base64,AA=="}
ITEMS: list[Any] = [
    {"role": "developer", "content": "Be brief."},
    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Look."}, IMAGE]},
    {"type": "reasoning", "id": "rs_mine", "content": [{"type": "reasoning_text", "text": "Hm."}], "status": None},
    {"role": "assistant", "content": "I look.", "id": "msg_mine", "phase": None},
    {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c1", "output": "there"},
    {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "there"}]},
    {"role": "assistant", "content": [{"type": "output_text", "text": "There."}], "id": "msg_mine"},
]

_item: TypeAdapter[Any] = TypeAdapter(sdk.ResponseItem)


async def respond(rig: Rig, input: Any = "hello", **fields: Any) -> Any:
    body = json.dumps({"model": "m", "input": input, **fields}).encode()
    client = await rig.ask(Client(body, path="/v1/responses"))
    assert client.status == 200, client.content
    return client.json


async def call(rig: Rig, method: str, path: str, query: str = "", **options: Any) -> Client:
    api = StoredResponsesApi(rig.components.authenticator, rig.components.policies, rig.response_store, rig.background)
    client = Client(method=method, path=f"/v1/responses/{path}", **options)
    await send(api, client, query)
    return client


async def listed(rig: Rig, name: str, query: str = "") -> Any:
    client = await call(rig, "GET", f"{name}/input_items", query)
    assert client.status == 200, client.content
    return client.json


async def test_a_stored_response_equals_the_one_that_was_sent(tmp_path: Path, validate: Validate) -> None:
    async with a_rig(tmp_path, responses=STORED) as rig:
        rig.script(answer("hi"))
        response = await respond(rig, instructions="Be brief.", tools=[TOOL], metadata={"a": "b"})
        client = await call(rig, "GET", response["id"])
        assert client.status == 200 and client.json == response
        check_response(validate, client.json)
        assert (await call(rig, "GET", response["id"], "stream=false&include_obfuscation=true")).json == response


async def test_a_deleted_response_does_not_exist(tmp_path: Path) -> None:
    async with a_rig(tmp_path, responses=STORED) as rig:
        rig.script(answer("hi"))
        name = (await respond(rig))["id"]
        deleted = await call(rig, "DELETE", name)
        assert (deleted.status, deleted.json) == (200, {"id": name, "object": "response", "deleted": True})
        for method, path in (("GET", name), ("DELETE", name), ("GET", f"{name}/input_items")):
            client = await call(rig, method, path)
            assert (client.status, client.json["error"]["code"]) == (404, "not_found")


async def test_a_response_of_another_tenant_does_not_exist(tmp_path: Path) -> None:
    async with a_rig(tmp_path, responses=STORED, tenants=[tenant(), OTHER]) as rig:
        rig.script(answer("hi"))
        name, none = (await respond(rig))["id"], f"resp_{'0' * 24}"
        for method, path in (("GET", "{}"), ("DELETE", "{}"), ("GET", "{}/input_items")):
            theirs = await call(rig, method, path.format(name), key=OTHER_KEY)
            unknown = await call(rig, method, path.format(none), key=OTHER_KEY)
            assert (theirs.status, unknown.status) == (404, 404)
            assert theirs.content.replace(name.encode(), none.encode()) == unknown.content
        assert (await call(rig, "GET", name)).status == 200
        assert (await call(rig, "GET", name, key="wp-dev-wrong")).status == 401


async def test_responses_do_not_exist_if_the_policy_stores_none(tmp_path: Path) -> None:
    """Not even those that were stored while it did."""
    async with a_rig(tmp_path, responses=STORED, tenants=[tenant(), {**OTHER, "responses": {"keep": "off"}}]) as rig:
        rig.script(answer("hi"))
        name = (await respond(rig))["id"]
        for method, path in (("GET", name), ("DELETE", name), ("GET", f"{name}/input_items")):
            client = await call(rig, method, path, key=OTHER_KEY)
            assert client.status == 404
            assert (
                client.json["error"]["message"] == f"response {name!r} does not exist: the policy stores no responses"
            )


async def test_an_unavailable_storage_is_503_and_not_404(tmp_path: Path) -> None:
    async with a_rig(tmp_path, responses=STORED) as rig:
        rig.script(answer("hi"))
        name = (await respond(rig))["id"]
        rig.storage.documents_away = True
        for method, path in (("GET", name), ("DELETE", name), ("GET", f"{name}/input_items")):
            client = await call(rig, method, path)
            assert (client.status, client.headers["retry-after"]) == (503, "1")


async def test_listed_input_items_have_all_fields_of_their_type(tmp_path: Path, validate: Validate) -> None:
    async with a_rig(tmp_path, responses=STORED) as rig:
        rig.script(answer("hi"))
        page = await listed(rig, (await respond(rig, ITEMS))["id"], "order=asc")
        validate("ResponseItemList", page)
        for item in page["data"]:
            _item.validate_python(item)
        ids = [item["id"] for item in page["data"]]
        assert len(set(ids)) == len(ITEMS) and (ids[2], ids[3]) == ("rs_mine", "msg_mine")
        assert (page["first_id"], page["last_id"], page["has_more"]) == (ids[0], ids[-1], False)
        assert [item["type"] for item in page["data"]] == [item.get("type", "message") for item in ITEMS]
        assert page["data"][1]["content"][1] == {**IMAGE, "detail": "auto"}
        assert page["data"][3]["content"][0]["text"] == "I look."


async def test_a_text_input_is_listed_as_a_user_message(tmp_path: Path, validate: Validate) -> None:
    """Only the items of its own request are listed. Earlier ones belong to the earlier response."""
    async with a_rig(tmp_path, responses=STORED) as rig:
        rig.script(answer("hi"))
        first = await respond(rig, "one")
        page = await listed(rig, (await respond(rig, "two", previous_response_id=first["id"]))["id"])
        validate("ResponseItemList", page)
        (item,) = page["data"]
        assert (item["role"], item["content"]) == ("user", [{"type": "input_text", "text": "two"}])


@pytest.mark.parametrize("order", ["asc", "desc"])
@pytest.mark.parametrize("limit", [1, 2, 3, 7, 100])
async def test_pages_add_up_to_the_whole_list(tmp_path: Path, order: str, limit: int) -> None:
    async with a_rig(tmp_path, responses=STORED) as rig:
        rig.script(answer("hi"))
        name = (await respond(rig, [{"role": "user", "content": str(number)} for number in range(7)]))["id"]
        texts: list[str] = []
        after, more = "", True
        while more:
            page = await listed(rig, name, f"order={order}&limit={limit}{after}")
            texts += [item["content"][0]["text"] for item in page["data"]]
            after, more = f"&after={page['last_id']}", page["has_more"]
        assert texts == sorted(map(str, range(7)), reverse=order == "desc")


@pytest.mark.parametrize(
    ("path", "query", "param"),
    [
        ("", "stream=true", "stream"),
        ("", "include=message.output_text.logprobs", "include"),
        ("", "include%5B%5D=x", "include[]"),
        ("", "starting_after=3", "starting_after"),
        ("/input_items", "limit=0", "limit"),
        ("/input_items", "limit=101", "limit"),
        ("/input_items", "limit=x", "limit"),
        ("/input_items", "order=up", "order"),
        ("/input_items", "after=nothing", "after"),
        ("/input_items", "before=msg_1", "before"),
    ],
)
async def test_unsupported_query_parameters_are_rejected_by_name(
    tmp_path: Path, path: str, query: str, param: str
) -> None:
    async with a_rig(tmp_path, responses=STORED) as rig:
        rig.script(answer("hi"))
        name = (await respond(rig))["id"]
        client = await call(rig, "GET", name + path, query)
        assert (client.status, client.json["error"]["param"]) == (400, param)


@pytest.mark.parametrize("name", ["x" * 10_000, "resp_", "%00", "é", "a b"])
async def test_an_invalid_id_is_not_found(tmp_path: Path, name: str) -> None:
    async with a_rig(tmp_path, responses=STORED) as rig:
        for method, path in (("GET", name), ("DELETE", name), ("GET", f"{name}/input_items")):
            client = await call(rig, method, path)
            assert client.status == 404 and len(client.content) < 500
