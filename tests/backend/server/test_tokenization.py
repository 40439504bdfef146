"""Tenants take turns at /tokenize and /detokenize, too: by the salt that the gateway sends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from backend.server.asgi import Endpoint, HttpExchange
from backend.server.components import ServerComponents
from backend.server.tokenization import DetokenizeEndpoint, TokenizeEndpoint


@pytest.mark.parametrize(
    ("endpoint", "body"),
    [
        (TokenizeEndpoint, b'{"prompt": "hi", "cache_salt": "salt"}'),
        (TokenizeEndpoint, b'{"messages": [{"role": "user", "content": "hi"}], "cache_salt": "salt"}'),
        (DetokenizeEndpoint, b'{"tokens": [1], "cache_salt": "salt"}'),
    ],
)
async def test_requests_are_prepared_in_the_turn_of_their_salt(
    endpoint: Callable[[ServerComponents, asyncio.Future[None]], Endpoint], body: bytes
) -> None:
    salts, replies = list[str | None](), list[bytes]()

    async def load_images(_messages: Any, salt: str | None) -> list[Any]:
        salts.append(salt)
        return []

    async def prepare(salt: str | None, size_bytes: int, _work: Callable[[], bytes]) -> bytes:
        assert size_bytes == len(body)
        salts.append(salt)
        return b"prepared"

    async def respond(reply: bytes) -> None:
        replies.append(reply)

    components = SimpleNamespace(check_model=lambda _name: None, load_images=load_images, prepare=prepare)
    made = endpoint(cast(ServerComponents, components), asyncio.get_running_loop().create_future())
    await made.handle(cast(HttpExchange, SimpleNamespace(respond=respond)), body)
    assert set(salts) == {"salt"}
    assert replies == [b"prepared"]
