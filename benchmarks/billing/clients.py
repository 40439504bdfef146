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
    body: dict[str, Any] | bytes  # JSON, or a form with the boundary `BOUNDARY`
    leaves_after: float | None


def _chat(model: str, text: str, tokens: int, stream: bool) -> tuple[str, dict[str, Any]]:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": text}]
    return "chat/completions", {"model": model, "messages": messages, "max_tokens": tokens, "stream": stream}


def _messages(model: str, text: str, tokens: int, stream: bool) -> tuple[str, dict[str, Any]]:
    messages = [{"role": "user", "content": text}]
    return "messages", {"model": model, "messages": messages, "max_tokens": tokens, "stream": stream}


def _completion(model: str, text: str, tokens: int, stream: bool) -> tuple[str, dict[str, Any]]:
    return "completions", {"model": model, "prompt": text, "max_tokens": tokens, "stream": stream}


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
    ("audio/transcriptions", None),  # a form with a file
)
BOUNDARY = "recording"
RECORDING = b"RIFF" + bytes(2000)


COMPLETING = ("openai", "reads", "vllm", "recorded")  # vendors whose API has completions


def _form(model: str) -> bytes:
    """A form with a recording, as clients of the audio API send it."""
    head = f'--{BOUNDARY}\r\ncontent-disposition: form-data; name="model"\r\n\r\n{model}\r\n--{BOUNDARY}\r\n'
    file = 'content-disposition: form-data; name="file"; filename="a.wav"\r\ncontent-type: audio/wav\r\n\r\n'
    return head.encode() + file.encode() + RECORDING + f"\r\n--{BOUNDARY}--\r\n".encode()


def a_request(chance: random.Random, models: list[str]) -> Request:
    """Draw one request."""
    model = chance.choice([*models, "media"])
    if model == "media":
        path, fields = chance.choice(MEDIA)
        return Request(path, _form(model) if fields is None else {"model": model, **fields}, None)
    tokens, stream = chance.randint(4, 60), chance.random() < 0.7
    # Each text is different, so no answer is shared or cached.
    text = f"{chance.getrandbits(64)} {TEXT * chance.randint(1, 12)}"
    endpoints = (*ENDPOINTS, _completion) if model in COMPLETING else ENDPOINTS
    path, body = chance.choice(endpoints)(model, text, tokens, stream)
    leaves = chance.uniform(0.0, 0.3) if chance.random() < LEAVING else None
    return Request(path, body, leaves)


async def send(port: int, key: str, request: Request) -> str:
    """Send a request. Returns how it ended: an HTTP status, `left`, or `failed` if the gateway was killed."""
    try:
        async with asyncio.timeout(CALL_SECONDS):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            try:
                is_form = isinstance(request.body, bytes)
                body = request.body if isinstance(request.body, bytes) else json.dumps(request.body).encode()
                kind = f"multipart/form-data; boundary={BOUNDARY}" if is_form else "application/json"
                head = (
                    f"POST /v1/{request.path} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {key}\r\n"
                    f"connection: close\r\ncontent-type: {kind}\r\ncontent-length: {len(body)}\r\n\r\n"
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
