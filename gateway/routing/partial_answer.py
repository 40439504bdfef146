"""Joins a cut stream and the stream that resumes it, so that both look like one answer to the client.

`PartialAnswer` collects what the first deployment sent. `ResumedAnswer` rewrites the events of
the second deployment. Both accept text only: another deployment cannot resume anything else.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from itertools import takewhile
from typing import Any, TypeGuard

import msgspec

from gateway.core.errors import UpstreamCut
from gateway.providers.usage.base import COUNT_MAX

UNREAD_MAX_BYTES = 16 * 1024  # of chunks that are kept unparsed
TEXT_MAX_CHARACTERS = 2**20  # of an answer that can be resumed

_BLANK_LINE = re.compile(rb"\n\r?\n")
_fields = msgspec.json.Decoder(dict[str, Any]).decode
_raw_fields = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_encode = msgspec.json.encode


class _NotResumable(Exception):
    """The answer contains something other than text, or it is complete."""


class _Choice(msgspec.Struct):
    index: int = 0
    delta: dict[str, Any] | None = None
    text: str | None = None
    finish_reason: str | None = None
    logprobs: Any = None


def _text_of(choices: Sequence[_Choice]) -> str:
    """The text of an event's choices. Raises `_NotResumable` if they contain anything else."""
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


def _is_count(value: Any) -> TypeGuard[int]:
    return type(value) is int and 0 <= value <= COUNT_MAX


def _frames(chunk: bytes) -> list[bytes]:
    """The events of a chunk, without the blank lines that end them."""
    frames = _BLANK_LINE.split(chunk) if b"\r" in chunk else chunk.split(b"\n\n")
    return [frame for frame in frames if frame]


def _data_of(frame: bytes) -> bytes:
    if frame.startswith(b"data: ") and b"\n" not in frame:
        return frame[6:].strip()
    return b"\n".join([line[5:].strip() for line in frame.splitlines() if line.startswith(b"data:")])


class PartialAnswer:
    """What a stream has sent so far. Parses chunks only in batches, or when their text is needed."""

    __slots__ = (
        "_counted", "_text_bytes", "_texts", "_tokens_per_byte", "_unread", "_unread_bytes", "characters", "head",
        "resumable", "usage",
    )  # fmt: skip

    def __init__(self, tokens_per_byte: float) -> None:
        """`tokens_per_byte` is the deployment's rate for text that it does not count."""
        self._tokens_per_byte = tokens_per_byte
        self._counted = 0  # output tokens by `usage`
        self._text_bytes = 0  # since `usage`
        self._unread: list[bytes] = []
        self._unread_bytes = 0
        self._texts: list[str] = []
        self.characters = 0
        self.head: _Event | None = None  # the first event
        self.resumable = True
        self.usage: dict[str, Any] | None = None  # the newest, if the deployment reports usage in every chunk

    @property
    def output_tokens(self) -> int:
        """By the deployment's newest usage, plus the tokens of the text since then. Never by the number of events."""
        return self._counted + math.ceil(self._text_bytes * self._tokens_per_byte)

    def add(self, chunk: bytes) -> None:
        """Add a chunk. Chunks after the answer has become not resumable are dropped."""
        if self.resumable:
            self._unread.append(chunk)
            self._unread_bytes += len(chunk)
            if self._unread_bytes > UNREAD_MAX_BYTES:
                self._read()

    @property
    def text(self) -> str:
        """All text so far; empty if the answer is not resumable."""
        self._read()
        return "".join(self._texts)

    def _read(self) -> None:
        chunks, self._unread, self._unread_bytes = b"".join(self._unread), [], 0
        try:
            for frame in _frames(chunks):
                if data := _data_of(frame):
                    self._read_event(_event(data))
        except (msgspec.MsgspecError, _NotResumable):
            self.resumable = False
        if self.characters > TEXT_MAX_CHARACTERS:
            self.resumable = False
        if not self.resumable:
            self._texts.clear()

    def _read_event(self, event: _Event) -> None:
        self.head = self.head or event
        if text := _text_of(event.choices):
            self._texts.append(text)
            self.characters += len(text)
            self._text_bytes += len(text.encode(errors="replace"))
        for choice in event.choices:
            if choice.finish_reason:
                raise _NotResumable  # the answer is complete; only `[DONE]` is missing
        if event.usage is not None:
            counted = event.usage.get("completion_tokens")
            if _is_count(counted):
                self.usage, self._counted, self._text_bytes = event.usage, counted, 0


class ResumedAnswer:
    """Rewrites the events of the resuming deployment as the rest of the cut answer."""

    def __init__(self, partial: PartialAnswer, *, overlap: str, usage_in_chunks: bool) -> None:
        """`overlap` is the end of the text that the client has and that the model will repeat.

        `usage_in_chunks` says whether chunks of the cut stream carried usage, or the client asked for it.
        """
        assert partial.head is not None
        self._head = partial.head
        self._usage_before = partial.usage
        self._output_before = partial.output_tokens
        self._overlap = overlap
        self._with_counts = usage_in_chunks
        self.deployment: str | None = None  # for the `warmpath` field of the first event; None once it was sent
        self.is_exact = False  # whether the sum of usage comes from the engines' own counts only

    def rewrite(self, chunk: bytes) -> bytes:
        """The chunk with its events rewritten; may be empty. Raises `UpstreamCut` if an event is not text."""
        try:
            return b"".join([self._frame(frame) for frame in _frames(chunk)])
        except (msgspec.MsgspecError, OverflowError, _NotResumable):
            raise UpstreamCut("the deployment that resumed the stream did not answer with text") from None

    def _frame(self, frame: bytes) -> bytes:
        data = _data_of(frame)
        if not data or data == b"[DONE]":
            return frame + b"\n\n"
        event = _fields(data)
        if event.get("error"):
            return frame + b"\n\n"
        choices = msgspec.convert(event.get("choices") or [], list[_Choice])
        event |= {"id": self._head.id, "created": self._head.created, "model": self._head.model}
        if isinstance(usage := event.get("usage"), dict) and usage:
            event["usage"] = self.merge_usage(usage)
            if choices and not self._with_counts:
                del event["usage"]
        if choices and not self._drop_overlap(event, choices):
            return b""
        if self.deployment is not None:
            event["warmpath"], self.deployment = {"continued_at": self.deployment}, None
        try:
            return b"data: %b\n\n" % _encode(event)
        except OverflowError:  # a count above 64 bits: metering gets it as it came, and rejects it
            if "usage" in event:
                event["usage"] = _raw_fields(data)["usage"]
        return b"data: %b\n\n" % _encode(event)

    def _drop_overlap(self, event: dict[str, Any], choices: list[_Choice]) -> bool:
        """Remove from the event the text that the client has already. False if nothing is left of the event."""
        text = self._without_overlap(_text_of(choices))
        for number, choice in enumerate(event["choices"]):
            new = text if number == 0 else ""
            if choice.get("delta") is not None:
                choice["delta"] = {"content": new} if new else {}
            else:
                choice["text"] = new
        return bool(text) or any(choice.finish_reason for choice in choices)

    def _without_overlap(self, text: str) -> str:
        """The text without the part that the client has already."""
        if self._overlap and text:
            same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(self._overlap, text, strict=False)))
            self._overlap = self._overlap[same:] if same == len(text) else ""
            return text[same:]
        return text

    def merge_usage(self, usage: dict[str, Any]) -> dict[str, Any]:
        """The usage of both deployments as one: the client's prompt, and the output of both.

        The second deployment counts the first one's output as a part of its prompt, so the total is its total, and only
        the border between prompt and output moves.
        """
        prompt, output = usage.get("prompt_tokens"), usage.get("completion_tokens")
        if not (_is_count(prompt) and _is_count(output)):
            return usage  # metering rejects it
        total, counts, before = prompt + output, {**usage}, prompt - self._output_before
        if self._usage_before is not None and _is_count(sent := self._usage_before.get("prompt_tokens")):
            self.is_exact = before == sent  # otherwise its tokenizer or template splits the text differently
            counts, before = {**self._usage_before}, sent
        before = min(max(before, 0), prompt)
        details = counts.get("prompt_tokens_details")
        if isinstance(details, dict) and _is_count(cached := details.get("cached_tokens")):
            counts["prompt_tokens_details"] = {**details, "cached_tokens": min(cached, before)}
        return counts | {"prompt_tokens": before, "completion_tokens": total - before, "total_tokens": total}
