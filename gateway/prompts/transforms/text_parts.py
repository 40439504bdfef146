"""P0 transform `text_parts`: a content of one plain text part becomes that text.

`"content": [{"type": "text", "text": "x"}]` becomes `"content": "x"`. Clients mix both forms within one conversation. A
template that knows parts renders both alike; for a template that knows only text, servers convert parts to text before
rendering. Several parts stay as they are, because templates join them differently. So does a part with any other key,
for example a cache breakpoint.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, Literal

import msgspec

from gateway.prompts.transforms.base import Message, MessagesTransform, MessagesView, Safety, TransformContext


class _Text(msgspec.Struct, forbid_unknown_fields=True):
    type: Literal["text"]
    text: msgspec.Raw


_one_text = msgspec.json.Decoder(tuple[_Text])
_FORBIDDEN_ROLES = {b'"assistant"', b'"tool"', b'"function"'}  # answers and tool results are never changed


class TextParts(MessagesTransform):
    """Replaces a single text part by its text."""

    name: ClassVar[str] = "text_parts"
    safety: ClassVar[Safety] = Safety.P0
    keeps_text: ClassVar[bool] = True

    def may_apply(self, view: MessagesView) -> bool:
        return not view.plain and not view.is_long and any(type(message.content) is list for message in view.messages)

    def change(self, messages: list[Message], context: TransformContext) -> Iterator[int]:
        for i, message in enumerate(messages):
            if bytes(message.get("role", b"")) in _FORBIDDEN_ROLES:
                continue
            text = _single_text(message.get("content"))
            if text is not None:
                message["content"] = text
                yield i


def _single_text(content: msgspec.Raw | None) -> msgspec.Raw | None:
    """The JSON string that is the whole content, if the content is a single text part."""
    if content is None or bytes(memoryview(content)[:1]) != b"[":
        return None
    try:
        text = _one_text.decode(content)[0].text
    except (msgspec.MsgspecError, RecursionError):  # other parts, or malformed ones
        return None
    return text if bytes(memoryview(text)[:1]) == b'"' else None
