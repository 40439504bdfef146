"""P3 transforms `volatile_to_end` and `volatile_to_user`: move changing lines of the system prompt behind stable text.

A line moves as a whole. It must be short, contain something volatile (`volatile.py`), and contain a word that says what
it is: `Today's date: 2026-11-20`, `Session id: 3f2a...`, `Working directory: /home/ada/x`. So dates that belong to the
prompt's topic stay.

Where a line should go depends on how often it changes. `volatile_to_end` moves it to the end of its own system message:
right for what is constant within a conversation (a date, a directory, a session id). `volatile_to_user` moves it to the
end of the last user message: right for a clock, which at the end of the system message would still precede the whole
history.
"""

from __future__ import annotations

import re
from abc import abstractmethod
from typing import Any, ClassVar

import msgspec

from gateway.core.cache_breakpoints import FIELD, FIELD_JSON
from gateway.prompts.transforms.base import (
    SYSTEM_ROLES,
    Message,
    MessagesTransform,
    MessagesView,
    Safety,
    TransformContext,
)
from gateway.prompts.transforms.volatile import KINDS

MAX_LINE_CHARACTERS = 200  # longer lines are prose, which is not split

_TIME_WORD = re.compile(r"(?i)(?<![a-z])(?:current|currently|today|now|date|datetime|time|timestamp|as of)(?![a-z])")
_ID_WORD = re.compile(
    r"(?i)(?<![a-z])(?:session|request|trace|run|conversation|thread|correlation|message|invocation|nonce|job|id|uuid)"
    r"(?![a-z])"
)
_PLACE_WORD = re.compile(r"(?i)(?<![a-z])(?:cwd|pwd|directory|dir|folder|workspace|root|path)(?![a-z])")
_WORDS = {"uuid": _ID_WORD, "clock": _TIME_WORD, "date": _TIME_WORD, "request_id": _ID_WORD, "cwd": _PLACE_WORD}

_parts = msgspec.json.Decoder(list[msgspec.Raw])
_any = msgspec.json.Decoder()
_encode = msgspec.json.encode


class _MoveVolatileLines(MessagesTransform):
    """Moves volatile lines of system messages, forward only.

    `include_trailing`: also lines that are already at the end, in parts of their own.
    """

    safety: ClassVar[Safety] = Safety.P3
    include_trailing: ClassVar[bool]

    def may_apply(self, view: MessagesView) -> bool:
        return any(message.role in ("system", "developer") for message in view.messages)

    def change(self, messages: list[Message], context: TransformContext) -> list[int]:
        moved: list[str] = []
        contents: dict[int, bytes] = {}
        last = _last_user(messages) if self.include_trailing else len(messages)
        for i, message in enumerate(messages[:last]):  # forward only
            if bytes(message.get("role", b"")) in SYSTEM_ROLES and FIELD not in message:
                content, lines = _split_volatile(
                    bytes(message.get("content", b"")), include_trailing=self.include_trailing
                )
                if lines:
                    contents[i] = self.place_lines(content, lines, moved)
        if moved:
            contents[last] = _appended(bytes(messages[last]["content"]), "\n".join(moved), "\n\n")
        changed = [i for i, content in contents.items() if content != bytes(messages[i]["content"])]
        for i in changed:
            messages[i]["content"] = msgspec.Raw(contents[i])
        return changed

    @abstractmethod
    def place_lines(self, content: bytes, lines: list[str], moved: list[str]) -> bytes:
        """The system message's content without `lines`. They are appended to it, or to `moved`."""


class VolatileToEnd(_MoveVolatileLines):
    """Moves volatile lines to the end of their system message."""

    name: ClassVar[str] = "volatile_to_end"
    include_trailing: ClassVar[bool] = False

    def place_lines(self, content: bytes, lines: list[str], moved: list[str]) -> bytes:
        return _appended(content, "\n".join(lines), "\n")


class VolatileToUser(_MoveVolatileLines):
    """Moves volatile lines to the end of the last user message."""

    name: ClassVar[str] = "volatile_to_user"
    include_trailing: ClassVar[bool] = True

    def place_lines(self, content: bytes, lines: list[str], moved: list[str]) -> bytes:
        moved += lines
        return content


def is_volatile(line: str) -> bool:
    """Whether a line is short and contains volatile text and a word that names it."""
    return len(line) <= MAX_LINE_CHARACTERS and any(
        pattern.search(line) and _WORDS[kind].search(line) for kind, pattern in KINDS.items()
    )


def _split_volatile(content: bytes, *, include_trailing: bool) -> tuple[bytes, list[str]]:
    """A system message's content without its volatile lines, and those lines.

    Parts with a cache breakpoint keep theirs. A message of nothing but volatile lines keeps all of them.
    """
    if content.startswith(b'"'):
        stable, lines = _split_text(_any.decode(content))
        return (_encode(stable), lines) if stable.strip() else (content, [])
    if not content.startswith(b"["):
        return content, []
    parts = [bytes(part) for part in _parts.decode(content)]
    texts = [_text_of(part) for part in parts]
    kept_parts: list[bytes] = []
    lines = []
    end = len(parts) if include_trailing else _count_before_trailing(texts)
    for part, text in zip(parts[:end], texts[:end], strict=True):
        stable, found = _split_text(text) if text is not None else ("", [])
        lines += found
        if not found:
            kept_parts.append(part)
        elif stable.strip():
            kept_parts.append(_encode({**_any.decode(part), "text": stable}))
    kept_parts += parts[end:]
    return (b"[" + b",".join(kept_parts) + b"]", lines) if kept_parts else (content, [])


def _count_before_trailing(texts: list[str | None]) -> int:
    """How many parts precede those at the end that contain only volatile lines.

    Those are in the right place already.
    """
    end = len(texts)
    while end and (text := texts[end - 1]) is not None and all(map(is_volatile, text.split("\n"))):
        end -= 1
    return end


def _text_of(part: bytes) -> str | None:
    """The text of a part; None if it is not text or carries a cache breakpoint."""
    value: Any = None if FIELD_JSON in part else _any.decode(part)
    text = value.get("text") if isinstance(value, dict) else None
    return text if isinstance(text, str) else None


def _split_text(text: str) -> tuple[str, list[str]]:
    lines = text.split("\n")
    volatile = [line for line in lines if is_volatile(line)]
    return "\n".join(line for line in lines if not is_volatile(line)), volatile


def _last_user(messages: list[Message]) -> int:
    """The index of the last user message; 0 if there is none or nothing can be appended to it."""
    for i in reversed(range(len(messages))):
        if bytes(messages[i].get("role", b"")) == b'"user"':
            can_append = FIELD not in messages[i] and bytes(messages[i].get("content", b""))[:1] in (b'"', b"[")
            return i if can_append else 0
    return 0


def _appended(content: bytes, text: str, separator: str) -> bytes:
    """The content with `text` appended: to a string, or as one more part."""
    if content.startswith(b'"'):
        return _encode(_any.decode(content) + separator + text)
    parts = [bytes(part) for part in _parts.decode(content)]
    return b"[" + b",".join([*parts, _encode({"type": "text", "text": text})]) + b"]"
