"""Responses in the dialect of each provider, and the chat responses that it must translate them to."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from typing import Any

from gateway.types import Operation
from tests.gateway.providers.scripted_server import STREAM_HEAD

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
    path: str = "{operation}"  # of a call that does not stream, to the model theirs/model
    key: tuple[str, str] = ("authorization", "Bearer secret-in-KEY_OF_D")
    stream_head: bytes = STREAM_HEAD
    lines: bool = False  # a stream is lines of JSON instead of events
    embeddings: bytes | None = None  # the answer to a request for embeddings; None: `answer`
    ends_with_body: bool = False  # a stream has no end marker, so the chat ends when the body does

    def path_of(self, operation: Operation) -> str:
        paths = {Operation.CHAT: "chat", Operation.EMBEDDING: "embed"} if self.lines else {}
        return self.path.format(operation=paths.get(operation, operation.value))

    def event(self, fields: bytes) -> bytes:
        """An event of a stream."""
        return fields + b"\n" if self.lines else b"data: %b\n\n" % fields


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

AZURE = replace(
    OPENAI,
    path="openai/deployments/theirs%2Fmodel/{operation}?api-version=2024-10-21",
    key=("api-key", "secret-in-KEY_OF_D"),
)

# Gemini: https://ai.google.dev/api/generate-content


def gemini(parts: list[dict[str, Any]], finish: str | None = None, **usage: Any) -> dict[str, Any]:
    """An answer of Gemini's API, or an event of a stream."""
    candidate = {
        "content": {"parts": parts, "role": "model"},
        **({"finishReason": finish} if finish else {}),
        "index": 0,
    }
    counts = {"usageMetadata": usage} if usage else {}
    return {"candidates": [candidate], **counts, "modelVersion": "theirs", "responseId": "msg_1"}


GEMINI_COUNTED: dict[str, Any] = {"promptTokenCount": 3, "candidatesTokenCount": 2, "totalTokenCount": 5}
_GEMINI_USAGE = {
    "prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5, "prompt_tokens_details": {"cached_tokens": 0}
}  # fmt: skip
_GOOGLE_ERROR = {"code": 500, "message": "out of memory", "status": "INTERNAL"}
_GOOGLE_REFUSAL = {"error": {"code": 400, "message": "too long", "status": "INVALID_ARGUMENT"}}

GEMINI = Wire(
    verbatim=False,
    answer=json.dumps(gemini([{"text": TEXT}], "STOP", **GEMINI_COUNTED)).encode(),
    chat_answer=data({**_WHOLE, "usage": _GEMINI_USAGE})[6:-2],
    opener=data(gemini([{"text": ""}], promptTokenCount=3)),
    chat_opener=chunk({"role": "assistant", "content": ""}),
    token=data(gemini([{"text": TEXT}])),
    chat_token=chunk({"content": TEXT}),
    usage=data(gemini([], **GEMINI_COUNTED)),
    chat_usage=b"",
    done=data(gemini([{"text": ""}], "STOP", **GEMINI_COUNTED)),
    chat_done=chunk({}, "stop") + chunk(None, usage=_GEMINI_USAGE) + _DONE,
    error=data({"error": _GOOGLE_ERROR}),
    refusal=json.dumps(_GOOGLE_REFUSAL).encode(),
    chat_refusal=b'{"error":{"message":"too long","type":"invalid_request_error","param":null,"code":null}}',
    operations=(Operation.CHAT,),
    path="models/theirs%2Fmodel:generateContent",
    key=("x-goog-api-key", "secret-in-KEY_OF_D"),
    ends_with_body=True,
)

# Ollama: https://github.com/ollama/ollama/blob/main/docs/api.md


def ollama(content: str, *, done: bool = False, **more: Any) -> dict[str, Any]:
    """An answer of Ollama's API, or a line of a stream."""
    message = {"role": "assistant", "content": content}
    return {"model": "theirs", "created_at": "2026-11-23T12:00:00Z", "message": message, "done": done, **more}


def line(fields: Any) -> bytes:
    return json.dumps(fields, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"


OLLAMA_COUNTED = {"prompt_eval_count": 3, "eval_count": 2}
_OLLAMA_USAGE = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}


def _of_call(chunks: bytes) -> bytes:
    """With the id that a translated answer of Ollama has."""
    return chunks.replace(b'"id":"msg_1"', b'"id":"chatcmpl-call-1"')


OLLAMA = Wire(
    verbatim=False,
    answer=line(ollama(TEXT, done=True, done_reason="stop", total_duration=5, **OLLAMA_COUNTED)).strip(),
    embeddings=b'{"model": "theirs", "embeddings": [[0.5, 1.0]], "prompt_eval_count": 3}',
    chat_answer=_of_call(data({**_WHOLE, "usage": _OLLAMA_USAGE})[6:-2]),
    opener=line(ollama("")),
    chat_opener=_of_call(chunk({"role": "assistant", "content": ""})),
    token=line(ollama(TEXT)),
    chat_token=_of_call(chunk({"content": TEXT})),
    usage=line(ollama("")),
    chat_usage=b"",
    done=line(ollama("", done=True, done_reason="stop", **OLLAMA_COUNTED)),
    chat_done=_of_call(chunk({}, "stop") + chunk(None, usage=_OLLAMA_USAGE)) + _DONE,
    error=line({"error": "out of memory"}),
    refusal=b'{"error": "too long"}',
    chat_refusal=b'{"error":{"message":"too long","type":"invalid_request_error","param":null,"code":null}}',
    operations=(Operation.CHAT, Operation.EMBEDDING),
    path="{operation}",
    stream_head=STREAM_HEAD.replace(b"text/event-stream; charset=utf-8", b"application/x-ndjson"),
    lines=True,
)

# By provider; all others use OPENAI
WIRES = {"anthropic": ANTHROPIC, "azure": AZURE, "gemini": GEMINI, "ollama": OLLAMA}


def wire_of(kind: str) -> Wire:
    return WIRES.get(kind, OPENAI)
