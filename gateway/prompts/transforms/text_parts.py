"""P0: a message whose content is one plain text part says the same as one whose content is that text.

`"content": [{"type": "text", "text": "x"}]` becomes `"content": "x"`. Clients mix both forms within one conversation.
A template that knows parts renders both alike; for one that knows only text, servers turn parts into text before they
render. Several parts stay as they are, since templates differ in how they join them, and so does a part with any
further key (a cache breakpoint, say).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, Literal

import msgspec

from gateway.prompts.transforms.base import Message, MessagesTransform, MessagesView, Safety


class _Text(msgspec.Struct, forbid_unknown_fields=True):
    type: Literal["text"]
    text: msgspec.Raw


_one_text = msgspec.json.Decoder(tuple[_Text])
_FORBIDDEN_ROLES = {b'"assistant"', b'"tool"', b'"function"'}  # history and tool results stay as they came


class TextParts(MessagesTransform):
    name: ClassVar[str] = "text_parts"
    safety: ClassVar[Safety] = Safety.P0
    same_words: ClassVar[bool] = True

    def sees(self, view: MessagesView) -> bool:
        return not view.plain and not view.long and any(type(message.content) is list for message in view.messages)

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
        text = _one_text.decode(content)[0].text
    except (msgspec.MsgspecError, RecursionError):  # other parts, or none that the server would take
        return None
    return text if bytes(memoryview(text)[:1]) == b'"' else None
