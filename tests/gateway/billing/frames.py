"""Replies of engines as frames, with counts or without, for tests of the meter."""

from __future__ import annotations

import re
from typing import Any

import msgspec
import orjson

from gateway.billing.metering import Meter
from gateway.types import Call, Operation, Usage
from tests.gateway.calls import a_call

CALL = a_call()
PROMPT_ESTIMATE = 40


def make_call(*, stream: bool = True, include_usage: bool = False, operation: Operation = Operation.CHAT) -> Call:
    return msgspec.structs.replace(
        CALL,
        stream=stream,
        include_usage=include_usage,
        operation=operation,
        prompt_tokens_estimate=PROMPT_ESTIMATE,
    )


def frame(value: dict[str, Any] | str, *, separators: tuple[str, str] = (",", ":"), end: str = "\n\n") -> bytes:
    text = value if isinstance(value, str) else dumps(value, separators)
    return f"data: {text}{end}".encode()


def dumps(value: dict[str, Any], separators: tuple[str, str]) -> str:
    compact = orjson.dumps(value).decode()
    if separators == (",", ":"):
        return compact
    # The spaces of json.dumps, put after the colons and commas that stand outside of strings.
    return re.sub(r'("(?:[^"\\]|\\.)*")|([:,])', lambda m: m[1] or m[2] + " ", compact)


def text_frame(content: str, **more: Any) -> dict[str, Any]:
    choice = {"index": 0, "delta": {"content": content}, "logprobs": None, "finish_reason": None}
    return {"id": "chatcmpl-1", "object": "chat.completion.chunk", "model": "m", "choices": [choice], **more}


ROLE = {
    "id": "chatcmpl-1",
    "object": "chat.completion.chunk",
    "choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}],
}
USAGE = {
    "prompt_tokens": 100,
    "completion_tokens": 3,
    "total_tokens": 103,
    "prompt_tokens_details": {"cached_tokens": 64},
    "completion_tokens_details": {"reasoning_tokens": 2},
}
USAGE_ONLY = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "choices": [], "usage": USAGE}
COUNTED = Usage(input_uncached=36, cache_read=64, output=3, reasoning=2, exact=True)


def watch_all(meter: Meter, chunks: list[bytes]) -> bytes:
    return b"".join(meter.watch(chunk) for chunk in chunks)


def stream(*texts: str, usage: bool = True) -> list[bytes]:
    frames = [frame(ROLE), *(frame(text_frame(text)) for text in texts)]
    return [*frames, *([frame(USAGE_ONLY)] if usage else []), frame("[DONE]")]
