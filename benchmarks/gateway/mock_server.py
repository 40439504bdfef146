"""A fast OpenAI-compatible server without inference: the upstream of the gateway benchmarks.

    python benchmarks/gateway/mock_server.py            # prints "listening on PORT"

Requests control it with standard fields, which every gateway passes on: `stream`; `max_tokens`, the number of content
chunks; and `user`, the pace. "paced-50" is 50 chunks per second, any other value is unpaced. It does not read prompts.
`/v1/traces` accepts and discards OpenTelemetry exports, so that a benchmark can run with tracing on.
"""

from __future__ import annotations

import asyncio
import json
import re
from typing import cast

import uvloop

_CONTENT_LENGTH = re.compile(rb"content-length: *(\d+)", re.IGNORECASE)
_STREAM = re.compile(rb'"stream": *true')
MAX_TOKENS = re.compile(rb'"max_tokens": *(\d+)')
PACE = re.compile(rb'"user": *"paced-(\d+)"')

_USAGE = {"prompt_tokens": 32, "completion_tokens": 8, "total_tokens": 40}
_MODELS = {"object": "list", "data": [{"id": "mock", "object": "model", "created": 0, "owned_by": "mock"}]}
_MESSAGE = {"role": "assistant", "content": "A prefix cache keeps keys and values. " * 8, "refusal": None}
_COMPLETION = {
    "id": "chatcmpl-mock",
    "object": "chat.completion",
    "created": 1_700_000_000,
    "model": "mock",
    "choices": [{"index": 0, "message": _MESSAGE, "logprobs": None, "finish_reason": "stop"}],
    "usage": _USAGE,
}


def _json_reply(value: object) -> bytes:
    body = json.dumps(value).encode()
    return b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)


def _event(choices: list[object], **more: object) -> bytes:
    """One event of about 200 bytes, as one chunk of the chunked transfer coding, as real servers send it."""
    head = {"id": "chatcmpl-mock", "object": "chat.completion.chunk", "created": 1_700_000_000, "model": "mock"}
    return _coded(b"data: " + json.dumps({**head, "choices": choices, **more}).encode() + b"\n\n")


def _coded(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


JSON_REPLY = _json_reply(_COMPLETION)
STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
TOKEN_EVENT = _event([{"index": 0, "delta": {"content": " token"}, "logprobs": None, "finish_reason": None}])
STREAM_END = (
    _event([{"index": 0, "delta": {}, "logprobs": None, "finish_reason": "stop"}]),
    _event([], usage=_USAGE),
    _coded(b"data: [DONE]\n\n") + b"0\r\n\r\n",
)
_MODELS_REPLY = _json_reply(_MODELS)
TRACES_REPLY = _json_reply({})


class MockServer(asyncio.Protocol):
    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._held = b""
        self._transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's transports do not inherit from it

    def data_received(self, data: bytes) -> None:
        self._held += data
        while (head_end := self._held.find(b"\r\n\r\n")) >= 0:
            head = self._held[:head_end]
            length = _CONTENT_LENGTH.search(head)
            end = head_end + 4 + (int(length[1]) if length else 0)
            if len(self._held) < end:
                return
            body, self._held = self._held[head_end + 4 : end], self._held[end:]
            self._answer(head, body)

    def _answer(self, head: bytes, body: bytes) -> None:
        if head.startswith(b"GET "):
            self._transport.write(_MODELS_REPLY)
        elif head.startswith(b"POST /v1/traces"):
            self._transport.write(TRACES_REPLY)
        elif not _STREAM.search(body):
            self._transport.write(JSON_REPLY)
        else:
            tokens = int(m[1]) if (m := MAX_TOKENS.search(body)) else 64
            pace = PACE.search(body)
            self._stream([TOKEN_EVENT] * tokens, 1 / int(pace[1]) if pace else 0.0)

    def _stream(self, events: list[bytes], interval_seconds: float) -> None:
        """Send the head with the first event in one write, and the last token with the end of the stream in another."""
        self._transport.write(STREAM_HEAD)
        if interval_seconds:
            self._paced(events, 0, self._loop.time(), interval_seconds)
            return
        for event in (*events, *STREAM_END):
            self._transport.write(event)

    def _paced(self, events: list[bytes], index: int, start: float, interval_seconds: float) -> None:
        """Send event i at start + i * interval, so that a late event does not delay later ones."""
        if self._transport.is_closing():
            return
        self._transport.write(events[index])
        if index + 1 < len(events):
            due = start + (index + 1) * interval_seconds
            self._loop.call_at(due, self._paced, events, index + 1, start, interval_seconds)
        else:
            for event in STREAM_END:
                self._transport.write(event)


async def serve() -> None:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: MockServer(loop), "127.0.0.1", 0, backlog=1024)
    print(f"listening on {server.sockets[0].getsockname()[1]}", flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(serve())
