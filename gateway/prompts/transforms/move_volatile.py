"""P3: lines of the system prompt that change from request to request, moved behind what stays the same.

A line moves as a whole, and only if it is short, has something volatile in it (`volatile.py`), and a word beside it
that says what it is: `Today's date: 2026-11-20`, `Session id: 3f2a...`, `Working directory: /home/ada/x`. So the dates
that a prompt speaks of stay where they are.

Where to depends on how often the line changes. `volatile_to_end` puts it at the end of its own system message: right
for what holds for a conversation (a date, a folder, a session id). `volatile_to_user` puts it at the end of the last
user message: right for a clock, which at the end of the system message would still stand before all of the history.
"""

from __future__ import annotations

import re
from abc import abstractmethod
from typing import Any, ClassVar

import msgspec

from gateway.core.cache_breakpoints import FIELD, FIELD_JSON
from gateway.prompts.transforms.base import SYSTEM_ROLES, Message, MessagesTransform, MessagesView, Safety
from gateway.prompts.transforms.volatile import KINDS

MAX_LINE_CHARACTERS = 200  # longer ones are prose, which can not be taken apart

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


class _Moving(MessagesTransform):
    safety: ClassVar[Safety] = Safety.P3
    everywhere: ClassVar[bool]

    def sees(self, view: MessagesView) -> bool:
        return any(message.role in ("system", "developer") for message in view.messages)

    def change(self, messages: list[Message]) -> list[int]:
        moved: list[str] = []
        contents: dict[int, bytes] = {}
        last = _last_user(messages) if self.everywhere else len(messages)
        for i, message in enumerate(messages[:last]):  # forward only
            if bytes(message.get("role", b"")) in SYSTEM_ROLES and FIELD not in message:
                content, lines = _split(bytes(message.get("content", b"")), everywhere=self.everywhere)
                if lines:
                    contents[i] = self.place(content, lines, moved)
        if moved:
            contents[last] = _appended(bytes(messages[last]["content"]), "\n".join(moved), "\n\n")
        changed = [i for i, content in contents.items() if content != bytes(messages[i]["content"])]
        for i in changed:
            messages[i]["content"] = msgspec.Raw(contents[i])
        return changed

    @abstractmethod
    def place(self, content: bytes, lines: list[str], moved: list[str]) -> bytes:
        """The system message's content without the `lines`, which go to its end or into `moved`."""


class VolatileToEnd(_Moving):
    name: ClassVar[str] = "volatile_to_end"
    everywhere: ClassVar[bool] = False

    def place(self, content: bytes, lines: list[str], moved: list[str]) -> bytes:
        return _appended(content, "\n".join(lines), "\n")


class VolatileToUser(_Moving):
    name: ClassVar[str] = "volatile_to_user"
    everywhere: ClassVar[bool] = True

    def place(self, content: bytes, lines: list[str], moved: list[str]) -> bytes:
        moved += lines
        return content


def is_volatile(line: str) -> bool:
    return len(line) <= MAX_LINE_CHARACTERS and any(
        pattern.search(line) and _WORDS[kind].search(line) for kind, pattern in KINDS.items()
    )


def _split(content: bytes, *, everywhere: bool) -> tuple[bytes, list[str]]:
    """A system message's content without its volatile lines, and these. Parts with a breakpoint keep theirs, and a
    message of nothing else keeps all. `everywhere`: also what stands at the end already, in parts of its own.
    """
    if content.startswith(b'"'):
        stable, lines = _split_text(_any.decode(content))
        return (_encode(stable), lines) if stable.strip() else (content, [])
    if not content.startswith(b"["):
        return content, []
    parts = [bytes(part) for part in _parts.decode(content)]
    texts = [_text_of(part) for part in parts]
    kept: list[bytes] = []
    lines = []
    end = len(parts) if everywhere else _before_trailing(texts)
    for part, text in zip(parts[:end], texts[:end], strict=True):
        stable, found = _split_text(text) if text is not None else ("", [])
        lines += found
        if not found:
            kept.append(part)
        elif stable.strip():
            kept.append(_encode({**_any.decode(part), "text": stable}))
    kept += parts[end:]
    return (b"[" + b",".join(kept) + b"]", lines) if kept else (content, [])


def _before_trailing(texts: list[str | None]) -> int:
    """How many parts stand before those at the end that are nothing but volatile: where they stand is right."""
    end = len(texts)
    while end and (text := texts[end - 1]) is not None and all(map(is_volatile, text.split("\n"))):
        end -= 1
    return end


def _text_of(part: bytes) -> str | None:
    """None for what is no text, or carries a breakpoint."""
    value: Any = None if FIELD_JSON in part else _any.decode(part)
    text = value.get("text") if isinstance(value, dict) else None
    return text if isinstance(text, str) else None


def _split_text(text: str) -> tuple[str, list[str]]:
    lines = text.split("\n")
    volatile = [line for line in lines if is_volatile(line)]
    return "\n".join(line for line in lines if not is_volatile(line)), volatile


def _last_user(messages: list[Message]) -> int:
    """The number of the last user message; 0, before which nothing stands, where nothing can be added to it."""
    for i in reversed(range(len(messages))):
        if bytes(messages[i].get("role", b"")) == b'"user"':
            able = FIELD not in messages[i] and bytes(messages[i].get("content", b""))[:1] in (b'"', b"[")
            return i if able else 0
    return 0


def _appended(content: bytes, text: str, separator: str) -> bytes:
    """Behind a text, or as one more part behind the others."""
    if content.startswith(b'"'):
        return _encode(_any.decode(content) + separator + text)
    parts = [bytes(part) for part in _parts.decode(content)]
    return b"[" + b",".join([*parts, _encode({"type": "text", "text": text})]) + b"]"
