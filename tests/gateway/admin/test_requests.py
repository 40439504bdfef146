"""Requests of operators in the name of a key, and the policy's document, in a whole gateway with a scripted server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.gateway.harness import DONE, KEY, answer, chat, delta, policy_of, tenant, usage_frame
from tests.gateway.providers.scripted_server import (
    ReceivedRequest,
    ScriptedServer,
    json_response,
)
from tests.gateway.server.application import Application, running

ADMIN_KEY = "an-admin-key-of-some-length"
PASSWORD, TOKEN, ARGUMENT = "open-sesame", "a-literal-token", "an-argument"
STREAM = delta("It") + delta(" is.") + usage_frame() + DONE


@pytest.fixture
async def received() -> list[ReceivedRequest]:
    return []


@pytest.fixture
async def app(tmp_path: Path, received: list[ReceivedRequest]) -> AsyncIterator[Application]:
    async def script(request: ReceivedRequest, writer: asyncio.StreamWriter) -> None:
        received.append(request)
        if b'"stream":true' in request.body.replace(b" ", b""):
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
            writer.write(b"%x\r\n%b\r\n0\r\n\r\n" % (len(STREAM), STREAM))
        else:
            writer.write(json_response(answer("It is.")))

    async with ScriptedServer(script) as server:
        url = server.base_url.replace("http://", f"http://user:{PASSWORD}@")
        policy = policy_of(
            deployments=[
                {"name": "a", "base_url": f"{url}?key={PASSWORD}", "model": "served", "headers": {"x-token": TOKEN}},
                {"name": "b", "base_url": "http://b.invalid/v1", "model": "served",
                 "api_key": {"command": ["echo", ARGUMENT]}},
            ],
            models=[{"name": "m", "deployments": ["a"]}, {"name": "two", "deployments": ["a", "b"]}],
            rules=[{"match": {"header": {"x-team": "night"}}, "class": "batch"}],
            tenants=[{**tenant(), "limits": {"requests": "3/1h"}}],
        )  # fmt: skip
        async with running(tmp_path, policy, admin_port=0, admin_key=ADMIN_KEY) as application:
            yield application


async def post(app: Application, path: str, body: bytes, **query: Any) -> httpx2.Response:
    transport = httpx2.ASGITransport(app=app.gateway.admin, raise_app_exceptions=False)
    async with httpx2.AsyncClient(transport=transport, base_url="http://admin") as client:
        headers = {"authorization": f"Bearer {ADMIN_KEY}", "content-type": "application/json"}
        return await client.post(path, content=body, params=query, headers=headers)


async def get(app: Application, path: str) -> Any:
    transport = httpx2.ASGITransport(app=app.gateway.admin)
    async with httpx2.AsyncClient(transport=transport, base_url="http://admin") as client:
        return (await client.get(path, headers={"authorization": f"Bearer {ADMIN_KEY}"})).json()


async def test_the_playground_sends_a_request_as_the_key(app: Application, received: list[ReceivedRequest]) -> None:
    reply = await post(app, "/admin/playground/chat/completions", chat(stream=True), key="dev")
    assert reply.status_code == 200, reply.text
    assert reply.headers["content-type"].startswith("text/event-stream")
    assert " is." in reply.text and reply.text.endswith("data: [DONE]\n\n")
    (call,) = (await get(app, "/admin/calls"))["data"]
    assert call["call_id"] == reply.headers["x-request-id"]
    assert (call["tenant"], call["key_id"], call["path"]) == ("t", "dev", "/v1/chat/completions")
    assert call["event_id"], "it has a receipt"
    (request,) = received
    sent = repr(request.headers)
    assert ADMIN_KEY not in sent and "key-id" not in sent.lower(), "the admin key stays here"


async def test_the_playground_has_the_key_s_limits_and_rules(app: Application) -> None:
    for _ in range(3):
        reply = await post(app, "/admin/playground/chat/completions", chat(), key="dev", header="x-team: night")
        assert (reply.status_code, reply.headers["x-warmpath-class"]) == (200, "batch")
    refused = await post(app, "/admin/playground/chat/completions", chat(), key="dev")
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit_exceeded")


@pytest.mark.parametrize(
    ("path", "query", "status", "param"),
    [
        ("/admin/playground/chat/completions", {}, 400, "key"),
        ("/admin/playground/chat/completions", {"key": "gone"}, 404, "key"),
        ("/admin/playground/chats", {"key": "dev"}, 404, "endpoint"),
        ("/admin/playground/chat/completions", {"key": "dev", "header": "nonsense"}, 400, "header"),
        ("/admin/playground/chat/completions", {"key": "dev", "header": ["x: y"] * 51}, 400, "header"),
        ("/admin/explain", {}, 400, "key"),
        ("/admin/explain", {"key": "gone"}, 404, "key"),
        ("/admin/explain", {"key": "dev", "endpoint": "chats"}, 400, "endpoint"),
    ],
)
async def test_errors_name_the_parameter(
    app: Application, received: list[ReceivedRequest], path: str, query: dict[str, Any], status: int, param: str
) -> None:
    reply = await post(app, path, chat(), **query)
    assert (reply.status_code, reply.json()["error"]["param"]) == (status, param), reply.text
    assert not received


async def test_both_need_the_admin_key(app: Application) -> None:
    transport = httpx2.ASGITransport(app=app.gateway.admin)
    async with httpx2.AsyncClient(transport=transport, base_url="http://admin") as client:
        for path in ("/admin/playground/chat/completions?key=dev", "/admin/explain?key=dev"):
            reply = await client.post(path, content=chat(), headers={"authorization": f"Bearer {KEY}"})
            assert reply.status_code == 401


async def test_explain_shows_class_canonical_form_and_route_without_sending(
    app: Application, received: list[ReceivedRequest]
) -> None:
    body = json.dumps({"model": "two", "messages": [{"content": "hello", "role": "user"}]}).encode()
    reply = await post(app, "/admin/explain", body, key="dev", header="x-team: night")
    assert reply.status_code == 200, reply.text
    found = reply.json()
    assert (found["tenant"], found["class"], found["rule"]["index"]) == ("t", "batch", 0)
    assert {each["deployment"] for each in found["candidates"]} == {"a", "b"}
    assert all(each["cost_seconds"] >= 0 for each in found["candidates"])
    assert not received
    assert (await get(app, "/admin/calls"))["data"] == []


async def test_explain_knows_the_caches_of_the_running_gateway(app: Application) -> None:
    text = "The same long prompt. " * 200
    await app.ask(chat(messages=[{"role": "user", "content": text}]))
    reply = await post(app, "/admin/explain", chat(messages=[{"role": "user", "content": text}]), key="dev")
    (candidate,) = reply.json()["candidates"]
    assert candidate["matched_tokens"] > 500


async def test_the_audit_log_names_the_key_and_has_no_prompt(app: Application, tmp_path: Path) -> None:
    body = chat(messages=[{"role": "user", "content": "a-secret-prompt"}])
    await post(app, "/admin/playground/chat/completions", body, key="dev")
    await post(app, "/admin/explain", body, key="dev")
    logged = b"".join(file.read_bytes() for file in (tmp_path / "audit").rglob("*") if file.is_file()).decode()
    assert logged.count('"key":"dev"') == 2, logged
    assert '"status":200' in logged.replace(" ", "")
    assert "a-secret-prompt" not in logged


async def test_explain_rejects_what_the_gateway_would_reject(app: Application) -> None:
    reply = await post(app, "/admin/explain", chat(model="unknown"), key="dev")
    assert (reply.status_code, reply.json()["error"]["code"]) == (404, "model_not_found")
    assert (await post(app, "/admin/explain", b" " * (4 * 2**20 + 1), key="dev")).status_code == 413


async def test_explain_counts_the_tokens_of_media(app: Application) -> None:
    png = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
    image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{png}"}}
    shown = await post(app, "/admin/explain", chat(messages=[{"role": "user", "content": [image]}]), key="dev")
    assert (shown.status_code, [*shown.json()["prompt"]["media_tokens"]]) == (200, ["image"])


async def test_explain_shows_any_json(app: Application) -> None:
    shown = await post(app, "/admin/explain", chat(unknown=2**70), key="dev")
    assert shown.status_code == 200, shown.text
    deep = chat()[:-1] + b',"unknown":' + b"[" * 400 + b"]" * 400 + b"}"
    assert (await post(app, "/admin/explain", deep, key="dev")).status_code in (200, 400)


async def test_the_document_has_the_last_change_and_no_secret(app: Application) -> None:
    first = await get(app, "/admin/policy/document")
    assert (first["previous"], first["diff"]) == (None, [])
    policy = json.loads(json.dumps(app.policies.current.model_dump(mode="json", by_alias=True, exclude_defaults=True)))
    policy["models"][0]["aliases"] = ["new-name"]
    policy["tenants"][0]["keys"][0]["hash"] = f"hmac-sha256:{'1' * 64}"
    app.write_policy(policy)
    assert await app.policies.reload()
    found = await get(app, "/admin/policy/document")
    assert (found["hash"], found["previous"]) == (app.policies.current.hash, first["hash"])
    added = [line[1:].strip() for line in found["diff"] if line.startswith("+")]
    assert "- new-name" in added
    assert any(line.startswith("hash: (hidden ") for line in added), "that a key changed is shown"
    for text in (first["text"], found["text"], "\n".join(found["diff"])):
        for secret in (PASSWORD, TOKEN, ARGUMENT, "hmac-sha256", "1111"):
            assert secret not in text, secret
    assert "b.invalid" in found["text"]


async def test_the_previous_policy_is_the_one_that_was_in_force_before(app: Application) -> None:
    policy = app.policies.current.model_dump(mode="json", by_alias=True, exclude_defaults=True)
    hashes = [app.policies.current.hash]
    for alias in ("b", "c", "b"):
        policy["models"][0]["aliases"] = [alias]
        app.write_policy(policy)
        assert await app.policies.reload()
        hashes.append(app.policies.current.hash)
    assert hashes[1] == hashes[3]
    assert (await get(app, "/admin/policy/document"))["previous"] == hashes[2]
