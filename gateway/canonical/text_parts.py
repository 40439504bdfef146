"""P0: a message whose content is one plain text part says the same as one whose content is that text.

`"content": [{"type": "text", "text": "x"}]` becomes `"content": "x"`. Clients mix both forms within one conversation.
A template that knows parts renders both alike; for one that knows only text, servers turn parts into text before they
render. Several parts stay as they are, since templates differ in how they join them, and so does a part with any
further key (a cache breakpoint, say).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import msgspec

from gateway.canonical.base import Message, MessagesTransform, Safety, View

_parts = msgspec.json.Decoder(list[dict[str, msgspec.Raw]])
_FORBIDDEN_ROLES = {b'"assistant"', b'"tool"', b'"function"'}  # history and tool results stay as they came


class TextParts(MessagesTransform):
    name: ClassVar[str] = "text_parts"
    safety: ClassVar[Safety] = Safety.P0

    def sees(self, view: View) -> bool:
        return not view.plain and any(type(message.content) is list for message in view.messages)

    def change(self, messages: list[Message]) -> Iterator[int]:
        for i, message in enumerate(messages):
            if bytes(message.get("role", b"")) in _FORBIDDEN_ROLES:
                continue
            text = _single_text(message.get("content"))
            if text is not None:
                message["content"] = text
                yield i


def _single_text(content: msgspec.Raw | None) -> msgspec.Raw | None:
    """The JSON string that is all of the content."""
    if content is None or bytes(memoryview(content)[:1]) != b"[":
        return None
    try:
        parts = _parts.decode(content)
    except (msgspec.MsgspecError, RecursionError):  # no such parts: the server is to judge them
        return None
    if len(parts) != 1 or parts[0].keys() != {"type", "text"} or bytes(parts[0]["type"]) != b'"text"':
        return None
    text = parts[0]["text"]
    return text if bytes(memoryview(text)[:1]) == b'"' else None
