"""P3 transforms `volatile_to_end` and `volatile_to_user`: move changing text of the system prompt behind stable text.

What moves is a sentence: a line, or a part of it that ends with a full stop. It must be short, contain something
volatile (`volatile.py`), and contain a word that says what it is: `Today's date: 2026-11-20`, `Session id: 3f2a...`,
`It is Friday, 20 November 2026.` So dates that belong to the prompt's topic stay. Without such a word, two kinds of
marks move, because nothing else than a mark of the request stands there: the first lines of a text if they consist of
volatile text only (`1763631667`), and a tag in brackets at the beginning of a text (`[3f2a9c1e] You are ...`).

Where it should go depends on how often it changes. `volatile_to_end` moves it to the end of its own system message:
right for what is constant within a conversation (a date, a directory, a session id). `volatile_to_user` moves it to the
end of the last user message: right for a clock, which at the end of the system message would still precede the whole
history.
"""

from __future__ import annotations

import re
from abc import abstractmethod
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
from gateway.prompts.transforms.volatile import spans

MAX_SENTENCE_CHARACTERS = 200  # longer ones say more than what time it is

_TIME_WORD = re.compile(
    r"(?i)(?<![a-z])(?:current|currently|today|now|date|datetime|time|timestamp|ts|epoch|unix|as of)(?![a-z])"
)
_IT_IS = re.compile(r"(?i)\bit(?: is|['\u2019]s)(?: the)?[\s:]*$")  # directly before a date or a time
_ID_WORD = re.compile(
    r"(?i)(?<![a-z])(?:session|request|trace|run|conversation|thread|correlation|message|invocation|nonce|job|id|uuid"
    r"|traceparent)(?![a-z])"
)
_PLACE_WORD = re.compile(r"(?i)(?<![a-z])(?:cwd|pwd|directory|dir|folder|workspace|root|path)(?![a-z])")
# A full stop ends a sentence if a capital letter follows, but not after an abbreviation.
_SENTENCE_END = re.compile(
    r"(?<=[.!?])(?<!\bMr\.)(?<!\bMs\.)(?<!\bDr\.)(?<!\bNo\.)(?<!\bSt\.)(?<!\bMrs\.)[ \t]+(?=[A-Z])"
)
_TAG = re.compile(r"\[([^\[\]\n]{1,200})\][ \t]+(?=\S)")
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
        return any(message.role in SYSTEM_ROLES for message in view.messages)

    def change(self, messages: list[Message], context: TransformContext) -> list[int]:
        moved: list[str] = []
        contents: dict[int, bytes] = {}
        last = _last_user(messages) if self.include_trailing else len(messages)
        for i, message in enumerate(messages[:last]):  # forward only
            if role_of(message) in SYSTEM_ROLES and FIELD not in message:
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


def is_volatile(sentence: str) -> bool:
    """Whether a sentence is short, and contains volatile text and a word that names it."""
    return len(sentence) <= MAX_SENTENCE_CHARACTERS and any(
        _WORDS[span.kind].search(sentence)
        or (span.kind in ("clock", "date") and _IT_IS.search(sentence, 0, span.start) is not None)
        for span in spans(sentence)
    )


def is_mark(line: str) -> bool:
    """Whether a short line contains volatile text with digits, and no other words. A path is not a mark."""
    if len(line) > MAX_SENTENCE_CHARACTERS:
        return False
    rest = list(line)
    for span in spans(line):
        if span.kind != "cwd":
            rest[span.start : span.end] = " " * (span.end - span.start)
    return any(map(str.isdigit, line)) and not any(map(str.isalnum, rest))


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
    while end and (text := texts[end - 1]) is not None and not _split_text(text)[0].strip():
        end -= 1
    return end


def _text_of(part: bytes) -> str | None:
    """The text of a part; None if it is not text or carries a cache breakpoint."""
    value: Any = _any.decode(part)
    text = value.get("text") if isinstance(value, dict) and FIELD not in value else None
    return text if isinstance(text, str) else None


def _split_text(text: str) -> tuple[str, list[str]]:
    """A text without marks and volatile sentences, and those.

    Marks come first, so that moving the result again changes nothing.
    """
    marks: list[str] = []
    moved: list[str] = []
    if (tag := _TAG.match(text)) and (is_volatile(tag[1]) or is_mark(tag[0])):
        marks.append(tag[0].rstrip())
        text = text[tag.end() :]
    stable: list[str] = []
    is_beginning = True
    for line in text.split("\n"):
        if is_beginning and is_mark(line):
            marks.append(line)
            continue
        sentences = _SENTENCE_END.split(line)
        kept = [sentence for sentence in sentences if not is_volatile(sentence)]
        if len(kept) == len(sentences):
            stable.append(line)
            is_beginning = is_beginning and not line.strip()
            continue
        moved += [sentence for sentence in sentences if is_volatile(sentence)]
        if kept:
            stable.append(" ".join(kept))
            is_beginning = False
    return "\n".join(stable), marks + moved


def _last_user(messages: list[Message]) -> int:
    """The index of the last user message; 0 if there is none or nothing can be appended to it."""
    for i in reversed(range(len(messages))):
        if role_of(messages[i]) == "user":
            can_append = FIELD not in messages[i] and bytes(messages[i].get("content", b""))[:1] in (b'"', b"[")
            return i if can_append else 0
    return 0


def _appended(content: bytes, text: str, separator: str) -> bytes:
    """The content with `text` appended: to a string, or as one more part."""
    if content.startswith(b'"'):
        return _encode(_any.decode(content) + separator + text)
    parts = [bytes(part) for part in _parts.decode(content)]
    return b"[" + b",".join([*parts, _encode({"type": "text", "text": text})]) + b"]"
