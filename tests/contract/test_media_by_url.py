"""Media by URL through the whole gateway: fetched by policy, refused by name, or sent to a deployment that takes URLs.

`tests/gateway/providers/media_fetch/` tests what is fetched and what is bounded.
"""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.gateway.harness import Client, answer, policy_of
from tests.gateway.providers.scripted_server import ReceivedRequest, ScriptedServer, json_response
from tests.gateway.providers.wires import ANTHROPIC, OLLAMA, OPENAI, Wire
from tests.gateway.server.application import Application, running

PNG = b"\x89PNG\r\n\x1a\n" + bytes(60)
PDF = b"%PDF-1.7 short"
PNG_DATA, PDF_DATA = base64.b64encode(PNG).decode(), base64.b64encode(PDF).decode()
WIRES = {"openai": OPENAI, "anthropic": ANTHROPIC, "ollama": OLLAMA}


class Setting(NamedTuple):
    """A gateway in front of scripted deployments by their names, and a scripted host of media."""

    app: Application
    servers: dict[str, ScriptedServer]
    media: ScriptedServer

    @property
    def host(self) -> str:
        """The host of media, as `media_fetch.hosts` names it."""
        return f"http://127.0.0.1:{self.media.port}"

    def sent(self, name: str) -> Any:
        """The body of the last request to a deployment."""
        return json.loads(self.servers[name].requests[-1].body)

    async def ask(self, *parts: dict[str, Any], path: str = "chat/completions", **fields: Any) -> Client:
        """Send a request with these parts, in which {host} is the host of media."""
        content = json.dumps([*parts]).replace("{host}", self.host)
        message = {"role": "user", "content": json.loads(content)}
        where = {"input": [message]} if path == "responses" else {"messages": [message]}
        return await self.app.ask(json.dumps({"model": "m", **where, **fields}).encode(), path=f"/v1/{path}")


@asynccontextmanager
async def setting(
    folder: Path, *providers: str, allowed: bool = True, changes: dict[str, Any] | None = None, **rules: Any
) -> AsyncIterator[Setting]:
    """One model whose deployments have these providers and are tried in this order."""

    async def host(request: ReceivedRequest, writer: asyncio.StreamWriter) -> None:
        kind, body = ("application/pdf", PDF) if ".pdf" in request.head else ("image/png", PNG)
        head = f"HTTP/1.1 200 OK\r\ncontent-type: {kind}\r\ncontent-length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)

    def deployment(wire: Wire) -> ScriptedServer:
        async def script(request: ReceivedRequest, writer: asyncio.StreamWriter) -> None:
            writer.write(json_response(answer() if wire is OPENAI else wire.answer))

        return ScriptedServer(script)

    async with AsyncExitStack() as stack:
        media = await stack.enter_async_context(ScriptedServer(host))
        servers = {name: await stack.enter_async_context(deployment(WIRES[name])) for name in providers}
        deployments = [
            {"name": name, "provider": name, "base_url": server.base_url, "model": "served", **(changes or {})}
            for name, server in servers.items()
        ]
        models = [
            {"name": "m", "deployments": [providers[0]], "fallbacks": [*providers[1:]]},
            *({"name": name, "deployments": [name]} for name in providers[1:]),
        ]
        hosts = [f"http://127.0.0.1:{media.port}"] if allowed else []
        policy = policy_of(deployments=deployments, models=models, rules=[], media_fetch={"hosts": hosts, **rules})
        app = await stack.enter_async_context(running(folder, policy))
        yield Setting(app, servers, media)


def image(url: str = "{host}/a.png") -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


async def test_ollama_gets_the_data_of_an_image(tmp_path: Path) -> None:
    async with setting(tmp_path, "ollama") as found:
        client = await found.ask({"type": "text", "text": "What is it?"}, image())
        assert found.sent("ollama")["messages"] == [
            {"role": "user", "content": "What is it?", "images": [PNG_DATA]},
        ]
        assert client.status == 200
        assert [request.head.split()[1] for request in found.media.requests] == ["/a.png"]


async def test_a_file_by_url_becomes_a_file_of_a_chat(tmp_path: Path) -> None:
    async with setting(tmp_path, "openai") as found:
        client = await found.ask({"type": "input_file", "file_url": "{host}/a.pdf"}, path="responses")
        assert client.status == 200, client.content
        (part,) = found.sent("openai")["messages"][0]["content"]
        data = f"data:application/pdf;base64,{PDF_DATA}"
        assert part == {"type": "file", "file": {"filename": "a.pdf", "file_data": data}}
        await found.ask(image())
        assert found.sent("openai")["messages"][0]["content"][0]["image_url"] == {"url": f"{found.host}/a.png"}


async def test_a_document_of_a_message_is_fetched_too(tmp_path: Path) -> None:
    document = {"type": "document", "source": {"type": "url", "url": "{host}/a.pdf"}}
    async with setting(tmp_path, "openai") as found:
        assert (await found.ask(document, path="messages", max_tokens=9)).status == 200
        assert PDF_DATA in found.servers["openai"].requests[-1].body.decode()


async def test_a_deployment_may_get_data_instead_of_all_urls(tmp_path: Path) -> None:
    async with setting(tmp_path, "anthropic", changes={"media_urls": "fetch"}) as found:
        source = {"type": "image", "source": {"type": "url", "url": "{host}/a.png"}}
        for path, part in (("chat/completions", image()), ("messages", source)):
            assert (await found.ask(part, path=path, max_tokens=9)).status == 200
            (sent,) = found.sent("anthropic")["messages"][0]["content"]
            assert sent["source"] == {"type": "base64", "media_type": "image/png", "data": PNG_DATA}


async def test_a_deployment_may_get_all_urls(tmp_path: Path) -> None:
    async with setting(tmp_path, "ollama", changes={"media_urls": "pass"}) as found:
        client = await found.ask(image())
        assert (client.status, client.json["error"]["param"]) == (400, "messages[0].content[0].image_url.url")
        assert not found.media.connections


@pytest.mark.parametrize("allowed", [False, True])
async def test_a_host_that_is_not_allowed_is_refused_with_the_field_and_the_way_out(
    tmp_path: Path, allowed: bool
) -> None:
    async with setting(tmp_path, "ollama", allowed=allowed) as found:
        client = await found.ask(image("http://127.0.0.1:1/a.png"))
        error = client.json["error"]
        assert (client.status, error["param"]) == (400, "messages[0].content[0].image_url.url")
        assert "media_fetch.hosts" in error["message"] and error["type"] == "invalid_request_error"
        assert error["code"] == ("media_not_fetched" if allowed else "unsupported_parameter")
        assert not found.servers["ollama"].requests and not found.media.connections


@pytest.mark.parametrize("allowed", [False, True])
async def test_a_deployment_that_takes_the_url_gets_a_call_for_which_it_may_not_be_fetched(
    tmp_path: Path, allowed: bool
) -> None:
    async with setting(tmp_path, "ollama", "openai", allowed=allowed) as found:
        client = await found.ask(image("https://images.test/a.png"))
        assert (client.status, client.headers["x-warmpath-deployment"]) == (200, "openai")
        assert found.sent("openai")["messages"][0]["content"] == [image("https://images.test/a.png")]


async def test_a_request_that_passes_unchanged_keeps_its_urls(tmp_path: Path) -> None:
    source = {"type": "image", "source": {"type": "url", "url": "{host}/a.png"}}
    async with setting(tmp_path, "anthropic") as found:
        assert (await found.ask(source, path="messages", max_tokens=9)).status == 200
        assert found.sent("anthropic")["messages"][0]["content"][0]["source"]["url"] == f"{found.host}/a.png"
        assert not found.media.connections
