"""What a stream has said until it was cut, and the rest of it from another server, made to look like one answer.

Only text: whatever else is in an answer, another server can not go on with.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import takewhile
from typing import Any

import msgspec

from gateway.core.errors import UpstreamCut

UNREAD_MAX_BYTES = 16 * 1024  # of chunks that are kept as they came; then their text is
TEXT_MAX_CHARACTERS = 2**20  # of an answer that can go on elsewhere

_BLANK_LINE = re.compile(rb"\n\r?\n")
_fields = msgspec.json.Decoder(dict[str, Any]).decode
_encode = msgspec.json.encode


class _NotResumable(Exception):
    """There is something in the answer besides text, or it has come to its end."""


class _Choice(msgspec.Struct):
    index: int = 0
    delta: dict[str, Any] | None = None
    text: str | None = None
    finish_reason: str | None = None
    logprobs: Any = None


def _text_of(choices: Sequence[_Choice]) -> str:
    """The text of an event. Raises `_NotPlain` where there is anything besides."""
    text = ""
    for choice in choices:
        if choice.index or choice.logprobs:
            raise _NotResumable
        for name, value in choice.delta.items() if choice.delta else ():
            if name == "content" and isinstance(value, str):
                text += value
            elif value and name != "role":
                raise _NotResumable
        text += choice.text or ""
    return text


class _Event(msgspec.Struct):
    id: msgspec.Raw = msgspec.Raw(b"null")
    created: msgspec.Raw = msgspec.Raw(b"null")
    model: msgspec.Raw = msgspec.Raw(b"null")
    choices: list[_Choice] = []
    usage: dict[str, Any] | None = None


_event = msgspec.json.Decoder(_Event).decode


def _frames(chunk: bytes) -> list[bytes]:
    """The events of a chunk, without the blank lines that end them."""
    frames = _BLANK_LINE.split(chunk) if b"\r" in chunk else chunk.split(b"\n\n")
    return [frame for frame in frames if frame]


def _data_of(frame: bytes) -> bytes:
    if frame.startswith(b"data: ") and b"\n" not in frame:
        return frame[6:].strip()
    return b"\n".join([line[5:].strip() for line in frame.splitlines() if line.startswith(b"data:")])


class PartialAnswer:
    """What a stream has said. Chunks are only looked into when there are many, or when their text is wanted."""

    __slots__ = ("_chunks", "_held_bytes", "_texts", "characters", "head", "output_tokens", "plain", "usage")

    def __init__(self) -> None:
        self._chunks: list[bytes] = []
        self._held_bytes = 0
        self._texts: list[str] = []
        self.characters = 0
        self.head: _Event | None = None  # the first event
        self.plain = True
        self.usage: dict[str, Any] | None = None  # the server's newest count, where it counts in every chunk
        self.output_tokens = 0  # by that count, and one for each event with text behind it

    def add(self, chunk: bytes) -> None:
        if self.plain:
            self._chunks.append(chunk)
            self._held_bytes += len(chunk)
            if self._held_bytes > UNREAD_MAX_BYTES:
                self._read()

    @property
    def text(self) -> str:
        self._read()
        return "".join(self._texts)

    def _read(self) -> None:
        chunks, self._chunks, self._held_bytes = b"".join(self._chunks), [], 0
        try:
            for frame in _frames(chunks):
                if data := _data_of(frame):
                    self._read_event(_event(data))
        except (msgspec.MsgspecError, _NotResumable):
            self.plain = False
        if self.characters > TEXT_MAX_CHARACTERS:
            self.plain = False
        if not self.plain:
            self._texts.clear()

    def _read_event(self, event: _Event) -> None:
        self.head = self.head or event
        if text := _text_of(event.choices):
            self._texts.append(text)
            self.characters += len(text)
            self.output_tokens += 1
        for choice in event.choices:
            if choice.finish_reason:
                raise _NotResumable  # it has come to its end: only that it had was lost
        if event.usage is not None:
            counted = event.usage.get("completion_tokens")
            if isinstance(counted, int):
                self.usage, self.output_tokens = event.usage, counted


class ResumedAnswer:
    """The answer of the server at which a stream goes on, as the rest of that which was cut."""

    def __init__(self, partial: PartialAnswer, *, overlap: str, with_counts: bool) -> None:
        """`overlap` is the end of what the client has, and comes once more. `with_counts`: chunks have had them."""
        assert partial.head is not None
        self._head = partial.head
        self._usage_before = partial.usage
        self._output_before = partial.output_tokens
        self._overlap = overlap
        self._with_counts = with_counts
        self.deployment: str | None = None  # whose it is; once it has been said, none
        self.is_exact = False  # whether the sum of usage is the engines' own

    def rewrite(self, chunk: bytes) -> bytes:
        """Raises `UpstreamCut` where it does not go on as text."""
        try:
            return b"".join([self._frame(frame) for frame in _frames(chunk)])
        except (msgspec.MsgspecError, _NotResumable):
            raise UpstreamCut("the server at which the answer went on did not answer with text") from None

    def _frame(self, frame: bytes) -> bytes:
        data = _data_of(frame)
        if not data or data == b"[DONE]":
            return frame + b"\n\n"
        event = _fields(data)
        if event.get("error"):
            return frame + b"\n\n"
        choices = msgspec.convert(event.get("choices") or [], list[_Choice])
        event |= {"id": self._head.id, "created": self._head.created, "model": self._head.model}
        if usage := event.get("usage"):
            event["usage"] = self.merge_usage(usage)
            if choices and not self._with_counts:
                del event["usage"]
        if choices and not self._drop_overlap(event, choices):
            return b""
        if self.deployment is not None:
            event["warmpath"], self.deployment = {"continued_at": self.deployment}, None
        return b"data: %b\n\n" % _encode(event)

    def _drop_overlap(self, event: dict[str, Any], choices: list[_Choice]) -> bool:
        """Whether anything is left of it."""
        text = self._new(_text_of(choices))
        for number, choice in enumerate(event["choices"]):
            new = text if number == 0 else ""
            if choice.get("delta") is not None:
                choice["delta"] = {"content": new} if new else {}
            else:
                choice["text"] = new
        return bool(text) or any(choice.finish_reason for choice in choices)

    def _new(self, text: str) -> str:
        """Without what the client has already."""
        if self._overlap and text:
            same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(self._overlap, text, strict=False)))
            self._overlap = self._overlap[same:] if same == len(text) else ""
            return text[same:]
        return text

    def merge_usage(self, usage: dict[str, Any]) -> dict[str, Any]:
        """The prompt that the client has sent, and the output of both servers. To the second, what the first had said
        was a part of the prompt: in all, nothing comes to it and nothing is lost."""
        prompt, output = usage.get("prompt_tokens"), usage.get("completion_tokens")
        if not isinstance(prompt, int) or not isinstance(output, int):
            return usage
        total, counts, before = prompt + output, {**usage}, prompt - self._output_before
        if self._usage_before is not None and isinstance(sent := self._usage_before.get("prompt_tokens"), int):
            self.is_exact = before == sent  # else its tokenizer or its template has another view of the text
            counts, before = {**self._usage_before}, sent
        before = min(max(before, 0), prompt)
        details = counts.get("prompt_tokens_details")
        if isinstance(details, dict) and isinstance(cached := details.get("cached_tokens"), int):
            counts["prompt_tokens_details"] = {**details, "cached_tokens": min(cached, before)}
        return counts | {"prompt_tokens": before, "completion_tokens": total - before, "total_tokens": total}
