"""The clients of the billing benchmark: requests of every endpoint, of which some leave before the end."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable
from typing import Any, NamedTuple

TEXT = "The river carries stones from the mountains to the sea, and on its way it makes them round and small. "
LEAVING = 0.15  # share of clients that leave
CALL_SECONDS = 600.0


class Request(NamedTuple):
    """One request: its path, body, and when its client leaves (seconds after it was sent; None: never)."""

    path: str
    body: dict[str, Any]
    leaves_after: float | None


def _chat(model: str, text: str, tokens: int, stream: bool) -> tuple[str, dict[str, Any]]:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": text}]
    return "chat/completions", {"model": model, "messages": messages, "max_tokens": tokens, "stream": stream}


def _messages(model: str, text: str, tokens: int, stream: bool) -> tuple[str, dict[str, Any]]:
    messages = [{"role": "user", "content": text}]
    return "messages", {"model": model, "messages": messages, "max_tokens": tokens, "stream": stream}


def _responses(model: str, text: str, tokens: int, stream: bool) -> tuple[str, dict[str, Any]]:
    return "responses", {"model": model, "input": text, "max_output_tokens": tokens, "stream": stream, "store": False}


ENDPOINTS: tuple[Callable[[str, str, int, bool], tuple[str, dict[str, Any]]], ...] = (
    _chat,
    _chat,
    _messages,
    _responses,
)
MEDIA = (
    ("images/generations", {"prompt": "a river", "n": 2}),
    ("rerank", {"query": "river", "documents": ["stone", "sea"]}),
    ("embeddings", {"input": TEXT}),
)


def a_request(chance: random.Random, models: list[str]) -> Request:
    """Draw one request."""
    model = chance.choice([*models, "media"])
    if model == "media":
        path, body = chance.choice(MEDIA)
        return Request(path, {"model": model, **body}, None)
    tokens, stream = chance.randint(4, 60), chance.random() < 0.7
    # Each text is different, so no answer is shared or cached.
    text = f"{chance.getrandbits(64)} {TEXT * chance.randint(1, 12)}"
    path, body = chance.choice(ENDPOINTS)(model, text, tokens, stream)
    leaves = chance.uniform(0.0, 0.3) if chance.random() < LEAVING else None
    return Request(path, body, leaves)


async def send(port: int, key: str, request: Request) -> str:
    """Send a request. Returns how it ended: an HTTP status, `left`, or `failed` if the gateway was killed."""
    try:
        async with asyncio.timeout(CALL_SECONDS):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            try:
                body = json.dumps(request.body).encode()
                head = (
                    f"POST /v1/{request.path} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {key}\r\n"
                    f"connection: close\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
                )
                writer.write(head.encode() + body)
                if request.leaves_after is not None:
                    await asyncio.sleep(request.leaves_after)
                    return "left"
                answer = await reader.read(-1)
                return answer.split(b" ", 2)[1].decode() if answer else "failed"
            finally:
                writer.close()
    except (OSError, TimeoutError, asyncio.IncompleteReadError):
        return "failed"
