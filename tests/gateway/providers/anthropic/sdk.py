"""Validates requests to Anthropic, and responses of scripted servers, against the types of Anthropic's SDK."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from anthropic.types import Message, RawMessageStreamEvent
from anthropic.types.message_create_params import MessageCreateParamsNonStreaming, MessageCreateParamsStreaming
from pydantic import TypeAdapter

UNTYPED = ("temperature", "top_p", "top_k")  # fields that the API accepts and the SDK no longer declares
_whole = TypeAdapter(MessageCreateParamsNonStreaming)
_streamed = TypeAdapter(MessageCreateParamsStreaming)
_event: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)


def read_request(body: bytes) -> dict[str, Any]:
    """Parse a request's body and check it against the SDK's types, down to the last block."""
    request: dict[str, Any] = json.loads(body)
    typed = {name: value for name, value in request.items() if name not in UNTYPED}
    assert typed.keys() <= MessageCreateParamsStreaming.__annotations__.keys()
    walk((_streamed if request.get("stream") else _whole).validate_python(typed))
    return request


def check_message(body: bytes) -> None:
    Message.model_validate_json(body, strict=True)


def check_events(stream: bytes) -> None:
    """Check that each event's data is an event of the SDK and has the name of its type."""
    for frame in stream.split(b"\n\n")[:-1]:
        name, data = frame.split(b"\n")
        fields = json.loads(data.removeprefix(b"data: "))
        assert name == b"event: " + fields["type"].encode()
        if fields["type"] not in ("ping", "error"):  # the SDK handles these before it checks types
            _event.validate_python(fields)


def walk(value: Any) -> None:
    """Iterate over everything, since Pydantic checks iterables only during iteration."""
    if isinstance(value, dict):
        for item in value.values():
            walk(item)
    elif isinstance(value, list | Iterator) or hasattr(value, "__next__"):
        for item in value:
            walk(item)
