"""P2 transform `noise`: removes lines at the beginning of a system prompt that are not meant for the model.

The known signatures are matched only at the very beginning of a system message or of one of its text parts, each on a
line of its own. Similar text further down is part of the prompt. A part that contains only noise is removed, unless it
is all that the message has.

* The billing line of Anthropic's coding agent: `x-anthropic-billing-header: cc_version=2.1.177.01c; ...; cch=36ee5;`.
  Its hash is new in every request, and it is the first line: without this transform, nothing of a conversation is ever
  cached. Seen in anthropics/claude-code#68900, sgl-project/sglang#29169, waybarrios/vllm-mlx#277.
* HTTP headers that were written into the prompt and identify a request or its trace: a W3C `traceparent`, and
  `x-request-id`, `x-correlation-id`, `x-trace-id`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, ClassVar

import msgspec

from gateway.core.cache_breakpoints import FIELD_JSON
from gateway.prompts.transforms.base import (
    SYSTEM_ROLES,
    Message,
    MessagesTransform,
    MessagesView,
    Safety,
    TransformContext,
)

SIGNATURES: dict[str, str] = {
    "anthropic_header": r"x-anthropic-[a-z0-9-]+:[^\n]*",
    "traceparent": r"traceparent: ?[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}[ \t]*",
    "request_id": r"x-(?:request|correlation|trace)-id: ?[\w.:-]{8,128}[ \t]*",
}
_NOISE = re.compile(r"(?:(?:" + "|".join(SIGNATURES.values()) + r")\r?(?:\n|\Z))+")
_BEGINNINGS = ("x-anthropic-", "x-request-id:", "x-correlation-id:", "x-trace-id:", "traceparent:")
_JSON_BEGINNINGS = tuple(b'"' + beginning.encode() for beginning in _BEGINNINGS)

_parts = msgspec.json.Decoder(list[msgspec.Raw])
_any = msgspec.json.Decoder()
_encode = msgspec.json.encode


class Noise(MessagesTransform):
    """Removes known noise from system messages."""

    name: ClassVar[str] = "noise"
    safety: ClassVar[Safety] = Safety.P2

    def may_apply(self, view: MessagesView) -> bool:
        for message in view.messages:
            if message.role not in ("system", "developer"):
                continue
            content = message.content
            if isinstance(content, str):
                if content.startswith(_BEGINNINGS):
                    return True
            elif content and any(beginning in bytes(part) for part in content for beginning in _JSON_BEGINNINGS):
                return True
        return False

    def change(self, messages: list[Message], context: TransformContext) -> Iterator[int]:
        for i, message in enumerate(messages):
            if bytes(message.get("role", b"")) in SYSTEM_ROLES and (quiet := _without_noise(message)) is not None:
                message["content"] = msgspec.Raw(quiet)
                yield i


def _without_noise(message: dict[str, msgspec.Raw]) -> bytes | None:
    content = bytes(message.get("content", b""))
    if "cache_control" in message:
        return None
    if content.startswith(b'"'):
        text: str = _any.decode(content)
        noise = _NOISE.match(text)
        quiet = text[noise.end() :] if noise else ""
        return _encode(quiet) if quiet else None
    if not content.startswith(b"["):
        return None
    parts = [bytes(part) for part in _parts.decode(content)]
    kept = [part for part in map(_quiet_part, parts) if part is not None]
    return None if kept == parts or not kept else b"[" + b",".join(kept) + b"]"


def _quiet_part(part: bytes) -> bytes | None:
    """The part without its noise; None if it contains nothing else."""
    if FIELD_JSON in part or not any(beginning in part for beginning in _JSON_BEGINNINGS):
        return part
    value: Any = _any.decode(part)
    text = value.get("text") if isinstance(value, dict) else None
    if not isinstance(text, str) or not (noise := _NOISE.match(text)):
        return part
    quiet = text[noise.end() :]
    return _encode({**value, "text": quiet}) if quiet else None
