"""P0: a message whose content is one plain text part says the same as one whose content is that text.

`"content": [{"type": "text", "text": "x"}]` becomes `"content": "x"`. Clients mix both forms within one conversation.
A template that knows parts renders both alike; for one that knows only text, servers turn parts into text before they
render. Several parts stay as they are, since templates differ in how they join them, and so does a part with any
further key (a cache breakpoint, say).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import msgspec

from gateway.canonical.base import Context, Safety
from gateway.types import Said

_messages = msgspec.json.Decoder(list[dict[str, msgspec.Raw]])
_parts = msgspec.json.Decoder(list[dict[str, Any]])
_encode = msgspec.json.encode
_FORBIDDEN_ROLES = {b'"assistant"', b'"tool"', b'"function"'}  # history and tool results stay as they came


class TextParts:
    name: ClassVar[str] = "text_parts"
    safety: ClassVar[Safety] = Safety.P0
    fields: ClassVar[tuple[str, ...]] = ("messages",)

    def sees(self, messages: Sequence[Said], head: bytes) -> bool:
        return any(type(message.content) is list for message in messages)

    def apply(self, raw: bytes, context: Context) -> bytes | None:
        messages = _messages.decode(raw)
        changed = False
        for message in messages:
            text = _single_text(message.get("content"))
            if text is not None and bytes(message.get("role", b"")) not in _FORBIDDEN_ROLES:
                message["content"] = msgspec.Raw(_encode(text))
                changed = True
        return _encode(messages) if changed else None


def _single_text(content: msgspec.Raw | None) -> str | None:
    if content is None or not bytes(content).lstrip().startswith(b"["):
        return None
    try:
        parts = _parts.decode(content)
    except (msgspec.MsgspecError, RecursionError):  # no such parts: the server is to judge them
        return None
    if len(parts) != 1 or parts[0].keys() != {"type", "text"} or parts[0]["type"] != "text":
        return None
    text = parts[0]["text"]
    return text if isinstance(text, str) else None
