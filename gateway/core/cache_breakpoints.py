"""Removes cache breakpoints from chats before prompts are compared or fingerprinted.

A breakpoint marks the point up to which the client wants the provider to cache the prompt: Anthropic's `cache_control`,
OpenAI's `prompt_cache_breakpoint`. A chat may have breakpoints on content parts, messages, tool calls and tools, and at
the top level of the body. Models do not see breakpoints, and clients move them forward with each message of a
conversation. Two prompts that differ only in breakpoints are therefore treated as the same prompt.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

FIELD = "cache_control"
FIELD_JSON = b'"cache_control"'  # a search for these bytes rules out most bodies without parsing them
OPENAI_FIELD = "prompt_cache_breakpoint"  # on content parts only
_OPENAI_FIELD_JSON = b'"prompt_cache_breakpoint"'

Fields = Mapping[str, msgspec.Raw]


class _TextPart(msgspec.Struct, forbid_unknown_fields=True):
    type: Literal["text"]
    text: str
    cache_control: Any = None
    prompt_cache_breakpoint: Any = None


_text_part = msgspec.json.Decoder(_TextPart).decode
_object = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_objects = msgspec.json.Decoder(list[dict[str, msgspec.Raw]]).decode
_encode = msgspec.json.encode


def part_text(part: msgspec.Raw) -> str | None:
    """Return the text of a plain text part, with or without a breakpoint. None for any other part."""
    try:
        return _text_part(part).text
    except (msgspec.MsgspecError, RecursionError):
        return None


def without_breakpoint(value: bytes) -> bytes:
    """Remove the breakpoint from the JSON of a content part or a tool. Any other JSON is returned unchanged."""
    if value.find(FIELD_JSON) < 0 and value.find(_OPENAI_FIELD_JSON) < 0:
        return value
    try:
        return _encode(_without(_object(value), OPENAI_FIELD))
    except (msgspec.MsgspecError, RecursionError):
        return value


def tool_calls_without_breakpoints(value: bytes) -> bytes:
    """Remove the breakpoints from the JSON of a list of tool calls. Any other JSON is returned unchanged."""
    if value.find(FIELD_JSON) < 0:
        return value
    try:
        return _encode([_without(call) for call in _objects(value)])
    except (msgspec.MsgspecError, RecursionError):
        return value


def without_breakpoints(fields: Fields) -> dict[str, msgspec.Raw]:
    """Remove all breakpoints from a chat's fields. The result is the same as if the client had set none.

    Raises `msgspec.MsgspecError` if the fields do not have the shape of a chat.
    """
    rest = {name: value for name, value in fields.items() if name != FIELD}
    for name, clean in (("messages", _message), ("tools", _without)):
        if name in rest and bytes(rest[name]).find(FIELD_JSON) >= 0:
            rest[name] = msgspec.Raw(_encode([clean(each) for each in _objects(rest[name])]))
    return rest


def _message(message: dict[str, msgspec.Raw]) -> dict[str, msgspec.Raw]:
    plain = _without(message)
    content = bytes(plain.get("content", b""))
    if content.startswith(b"[") and content.find(FIELD_JSON) >= 0:
        parts = [_without(part) for part in _objects(content)]
        # A client that sets no breakpoint sends a single text part as a string.
        alone = len(parts) == 1 and parts[0].keys() == {"type", "text"}
        plain["content"] = parts[0]["text"] if alone else msgspec.Raw(_encode(parts))
    if "tool_calls" in plain:
        plain["tool_calls"] = msgspec.Raw(tool_calls_without_breakpoints(bytes(plain["tool_calls"])))
    return plain


def _without(marked: dict[str, msgspec.Raw], *names: str) -> dict[str, msgspec.Raw]:
    return {name: value for name, value in marked.items() if name != FIELD and name not in names}
