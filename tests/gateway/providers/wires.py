"""Responses in the dialect of each provider, and the chat responses that it must translate them to."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from gateway.types import Operation

TEXT = "a [DONE] é"


@dataclass(frozen=True)
class Wire:
    """Responses as the deployment sends them, each followed by its chat form. `verbatim`: both are the same bytes."""

    verbatim: bool
    answer: bytes
    chat_answer: bytes
    opener: bytes
    chat_opener: bytes
    token: bytes
    chat_token: bytes
    usage: bytes
    chat_usage: bytes
    done: bytes
    chat_done: bytes
    error: bytes  # an event with the error `out of memory`
    refusal: bytes  # the body of a 400
    chat_refusal: bytes
    operations: tuple[Operation, ...] = tuple(Operation)
    path: str | None = None  # None: the path of the operation

    def path_of(self, operation: Operation) -> str:
        return self.path or operation.value


def data(fields: Any) -> bytes:
    return b"data: %b\n\n" % json.dumps(fields, ensure_ascii=False, separators=(",", ":")).encode()


def event(**fields: Any) -> bytes:
    """An event of Anthropic's Messages API."""
    return b"event: %b\n" % fields["type"].encode() + data(fields)


def timeless(chunks: bytes) -> bytes:
    """The chunks without `created`, the time of their translation."""
    return re.sub(rb'"created":\d+,', b"", chunks)


_TOKEN = b'data: {"id":"c","choices":[{"index":0,"delta":{"content":"a [DONE] \xc3\xa9"}}]}\n\n'
_USAGE = b'data: {"id":"c","choices":[],"usage":{"prompt_tokens":3,"completion_tokens":2,"total_tokens":5}}\n\n'
_DONE = b"data: [DONE]\n\n"
_ANSWER = b'{"id": "c",  "choices": [], "unknown": 1e400}'
_REFUSAL = b'{"error": {"message": "too long", "code": "context_length_exceeded"}}'

OPENAI = Wire(
    verbatim=True,
    answer=_ANSWER, chat_answer=_ANSWER,
    opener=b"", chat_opener=b"",
    token=_TOKEN, chat_token=_TOKEN,
    usage=_USAGE, chat_usage=_USAGE,
    done=_DONE, chat_done=_DONE,
    error=data({"error": {"message": "out of memory", "code": 500}}),
    refusal=_REFUSAL, chat_refusal=_REFUSAL,
)  # fmt: skip

COUNTED = {"input_tokens": 3, "output_tokens": 2}
CHAT_COUNTED = {
    "prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5,
    "prompt_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
}  # fmt: skip


def message(content: list[dict[str, Any]], usage: dict[str, Any] = COUNTED, **more: Any) -> dict[str, Any]:
    """A message as Anthropic's Messages API sends it."""
    return {
        "id": "msg_1", "type": "message", "role": "assistant", "model": "theirs", "content": content,
        "stop_reason": "end_turn", "stop_sequence": None, "usage": usage, **more,
    }  # fmt: skip


def message_start(usage: dict[str, Any] = COUNTED) -> bytes:
    return event(type="message_start", message=message([], usage, stop_reason=None))


def block_start(index: int, **block: Any) -> bytes:
    return event(type="content_block_start", index=index, content_block=block)


def block_delta(index: int, **delta: Any) -> bytes:
    return event(type="content_block_delta", index=index, delta=delta)


def block_stop(index: int) -> bytes:
    return event(type="content_block_stop", index=index)


def message_delta(stop_reason: str = "end_turn", **usage: Any) -> bytes:
    delta = {"stop_reason": stop_reason, "stop_sequence": None}
    return event(type="message_delta", delta=delta, usage={"output_tokens": 2, **usage})


MESSAGE_STOP = event(type="message_stop")


def messages_error(kind: str, text: str) -> dict[str, Any]:
    return {"type": "error", "error": {"type": kind, "message": text}, "request_id": "req_1"}


def chunk(delta: dict[str, Any] | None, finish: str | None = None, **more: Any) -> bytes:
    """A chunk of a chat that a message was translated to."""
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
    head = {"id": "msg_1", "object": "chat.completion.chunk", "model": "theirs"}
    return data({**head, "choices": [] if delta is None else [choice], **more})


_WHOLE = {
    "id": "msg_1", "object": "chat.completion", "model": "theirs",
    "choices": [
        {
            "index": 0, "message": {"role": "assistant", "content": TEXT, "refusal": None},
            "logprobs": None, "finish_reason": "stop",
        }
    ],
    "usage": CHAT_COUNTED,
}  # fmt: skip

ANTHROPIC = Wire(
    verbatim=False,
    answer=json.dumps(message([{"type": "text", "text": TEXT}])).encode(),
    chat_answer=data(_WHOLE)[6:-2],
    opener=message_start() + block_start(0, type="text", text=""),
    chat_opener=chunk({"role": "assistant", "content": ""}, warmpath={"usage": CHAT_COUNTED}),
    token=block_delta(0, type="text_delta", text=TEXT),
    chat_token=chunk({"content": TEXT}),
    usage=block_stop(0) + message_delta(),
    chat_usage=chunk({}, "stop"),
    done=MESSAGE_STOP,
    chat_done=chunk(None, usage=CHAT_COUNTED) + _DONE,
    error=event(**messages_error("api_error", "out of memory")),
    refusal=json.dumps(messages_error("invalid_request_error", "too long")).encode(),
    chat_refusal=b'{"error":{"message":"too long","type":"invalid_request_error","param":null,"code":null}}',
    operations=(Operation.CHAT,),
    path="messages",
)

WIRES = {"anthropic": ANTHROPIC}  # by provider; all others use OPENAI


def wire_of(kind: str) -> Wire:
    return WIRES.get(kind, OPENAI)
