"""Passes over members of chat messages that the server does not know, as vLLM does, and says which ones.

The response header `x-ignored-fields` names them, and the request's fields that `request_body.py` passes over.

Clients send back messages with members that another API added to them, so an unknown member must not end a
conversation. A member of a message cannot ask for anything. A field of the request can, so unknown fields are rejected.
Requests without unknown members do not pay for this: they are decoded as they are first.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, TypeVar

import msgspec
from msgspec import Struct

from backend.server.errors import InvalidRequest
from backend.server.messages import (
    AssistantMessage,
    DeveloperMessage,
    FunctionCall,
    ImagePart,
    ImageUrl,
    SystemMessage,
    TextPart,
    ToolCall,
    ToolMessage,
    UserMessage,
)
from backend.server.request_body import decode_body

HEADER = "x-ignored-fields"
MAX_NAMED = 8  # members in the header; of more, only the number
MAX_NAME_CHARACTERS = 100
_UNPRINTABLE = re.compile(r"[^!-~]")

_MESSAGES: dict[str, type[Struct]] = {
    str(kind.__struct_config__.tag): kind
    for kind in (SystemMessage, DeveloperMessage, UserMessage, AssistantMessage, ToolMessage)
}

_PARTS: dict[str, type[Struct]] = {str(kind.__struct_config__.tag): kind for kind in (TextPart, ImagePart)}

R = TypeVar("R", bound=Struct)


def decode_chat(body: bytes, kind: type[R]) -> tuple[R, list[str]]:
    """Decodes a body like `decode_body`. Also returns the paths of all fields and members that were passed over."""
    fields: list[str] = []
    try:
        return decode_body(body, kind, fields), fields
    except InvalidRequest as error:
        if not (error.param or "").startswith("messages["):
            raise
        value = msgspec.json.decode(body)
        ignored = list(_remove_unknown(value))
        if not ignored:
            raise
    return decode_body(msgspec.json.encode(value), kind), fields + ignored


def ignored_header(ignored: list[str]) -> dict[str, str]:
    """Returns the response header that names what was passed over, or no header if nothing was."""
    if not ignored:
        return {}
    more = f" and {len(ignored) - MAX_NAMED} more" if len(ignored) > MAX_NAMED else ""
    return {HEADER: ", ".join(_UNPRINTABLE.sub("?", name)[:MAX_NAME_CHARACTERS] for name in ignored[:MAX_NAMED]) + more}


def _remove_unknown(body: dict[str, Any]) -> Iterator[str]:
    """Removes the unknown members of a body's messages, and yields their paths."""
    for i, message in enumerate(body["messages"]):
        if not isinstance(message, dict) or (kind := _MESSAGES.get(str(message.get("role")))) is None:
            continue  # not a message: the error names it
        path = f"messages[{i}]"
        yield from _remove_members(message, kind, path)
        parts, calls = message.get("content"), message.get("tool_calls")
        for j, part in enumerate(parts if isinstance(parts, list) else ()):
            if isinstance(part, dict) and (of_part := _PARTS.get(str(part.get("type")))):
                yield from _remove_members(part, of_part, f"{path}.content[{j}]")
                if isinstance(url := part.get("image_url"), dict):
                    yield from _remove_members(url, ImageUrl, f"{path}.content[{j}].image_url")
        for j, call in enumerate(calls if isinstance(calls, list) else ()):
            if isinstance(call, dict):
                yield from _remove_members(call, ToolCall, f"{path}.tool_calls[{j}]")
                if isinstance(function := call.get("function"), dict):
                    yield from _remove_members(function, FunctionCall, f"{path}.tool_calls[{j}].function")


def _remove_members(value: dict[str, Any], kind: type[Struct], path: str) -> Iterator[str]:
    known = {*kind.__struct_encode_fields__, kind.__struct_config__.tag_field}
    for name in [name for name in value if name not in known]:
        del value[name]
        yield f"{path}.{name}"
