"""Helpers for one request to a scripted server."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import httpx2

from gateway.providers.transport import HTTPTransport
from tests.gateway.providers.scripted_server import TIMEOUT_SECONDS, ReceivedRequest, ScriptedServer


def answering(
    *answers: bytes, close: bool = False
) -> Callable[[ReceivedRequest, asyncio.StreamWriter], Awaitable[None]]:
    async def script(_: ReceivedRequest, writer: asyncio.StreamWriter) -> None:
        for answer in answers:
            writer.write(answer)
            await writer.drain()
        if close:
            writer.close()

    return script


def post(server: ScriptedServer, body: bytes = b"{}", **timeout: float) -> httpx2.Request:
    return httpx2.Request("POST", f"{server.base_url}/x", content=body, extensions={"timeout": timeout})


def pieces(response: httpx2.Response) -> httpx2.AsyncByteStream:
    assert isinstance(response.stream, httpx2.AsyncByteStream)
    return response.stream


async def fetch(transport: HTTPTransport, request: httpx2.Request) -> tuple[httpx2.Response, bytes]:
    async with asyncio.timeout(TIMEOUT_SECONDS):
        response = await transport.handle_async_request(request)
        return response, await response.aread()
