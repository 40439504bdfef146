"""P2 transform `noise`: removes lines that a known client writes into its prompts and that are not for the model.

There is one such line, of Anthropic's coding agent:
`x-anthropic-billing-header: cc_version=2.1.177.01c; cc_entrypoint=cli; cch=36ee5;`. Its hash is new in every request,
and it is the first text of the prompt: without this transform, nothing of a conversation is ever cached. Seen in
anthropics/claude-code#68900, sgl-project/sglang#21064, farion1231/cc-switch#2350.

The agent sends the line as the first block of its system prompt. Routers that translate its requests may join the
blocks, and then it is the first line of the first system message. It is removed only there, and only if it consists of
the fields that the agent writes. Text that looks like it anywhere else is part of the prompt, as are all other headers:
no client is known that writes them there. `volatile_to_user` moves those that identify a request or its trace.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, ClassVar

import msgspec

from gateway.core.cache_breakpoints import FIELD
from gateway.prompts.transforms.base import (
    SYSTEM_ROLES,
    Message,
    MessagesTransform,
    MessagesView,
    Safety,
    TransformContext,
    role_of,
)

SIGNATURES: dict[str, str] = {  # patterns of whole lines, by the client that writes them
    "claude_code": r"(?i:x-anthropic-billing-header): cc_version=[\w.-]+; cc_entrypoint=[\w.-]+;(?: [a-z_]+=[^;\s]*;)*",
}
LINE_CHARACTERS_MAX = 512
_NOISE = re.compile(r"(?:" + "|".join(SIGNATURES.values()) + r")[ \t]*\r?(?:\n|\Z)")

_parts = msgspec.json.Decoder(list[msgspec.Raw])
_any = msgspec.json.Decoder()
_encode = msgspec.json.encode


class Noise(MessagesTransform):
    """Removes known noise from the beginning of the first system message."""

    name: ClassVar[str] = "noise"
    safety: ClassVar[Safety] = Safety.P2
    first_only: ClassVar[bool] = True

    def may_apply(self, view: MessagesView) -> bool:
        first = view.messages[0]
        if first.role not in SYSTEM_ROLES or not first.content:
            return False
        if isinstance(first.content, str):
            return _NOISE.match(first.content, 0, LINE_CHARACTERS_MAX) is not None
        beginning = bytes(memoryview(first.content[0])[:LINE_CHARACTERS_MAX]).lower()
        return b"billing" in beginning or b"\\u" in beginning

    def change(self, messages: list[Message], context: TransformContext) -> Iterator[int]:
        first = messages[0]
        if role_of(first) in SYSTEM_ROLES and FIELD not in first:
            quiet = _without_noise(bytes(first.get("content", b"")))
            if quiet is not None:
                first["content"] = msgspec.Raw(quiet)
                yield 0


def _without_noise(content: bytes) -> bytes | None:
    """A message's content without its noise; None if there is none, or nothing else."""
    if content.startswith(b'"'):
        quiet = _quiet(_any.decode(content))
        return _encode(quiet) if quiet else None
    if not content.startswith(b"["):
        return None
    first, *others = _parts.decode(content)
    part: Any = _any.decode(first)
    if not isinstance(part, dict) or FIELD in part or not isinstance(part.get("text"), str):
        return None
    quiet = _quiet(part["text"])
    if quiet is None or not (quiet or others):
        return None
    return _encode([msgspec.Raw(_encode({**part, "text": quiet})), *others] if quiet else others)


def _quiet(text: str) -> str | None:
    noise = _NOISE.match(text, 0, LINE_CHARACTERS_MAX)
    return text[noise.end() :] if noise else None
