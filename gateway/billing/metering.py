"""What a call consumed: a `Meter` watches the reply go by and reads its usage.

The meter scans bytes and parses nothing on the ordinary path: a chunk of text costs about a microsecond, and a
stream of any length a few integers of state. The upstream is always asked for usage; the frame that carries only
usage is taken out again for a client that did not ask, and so are the counts of every chunk where we alone wanted them.

What counts, by the way the reply ended:

  the engine counted                 its numbers, exact; the last ones win where every chunk has them; also of an
                                     answer that ended early, where the engine keeps a record of it
  text after the engine's last word  its numbers, and one token per further frame; an estimate
  the engine said nothing            the prompt's estimate, and one token per frame of text; an estimate
  no output at all                   nothing, as an estimate: whether the prompt was computed is not known

`gateway.billing.receipts` prices it; docs/explanation/billing.md has the whole table.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Iterator
from typing import Any

import msgspec

from gateway.providers.usage import RawUsage, normalize_usage
from gateway.types import Call, Usage

BYTES_PER_TOKEN = 4  # of English text, for answers whose engine did not count
_BLANK_LINE = re.compile(rb"\n\r?\n")  # ends a frame; JSON has no raw newline, so text can not imitate it
_USAGE_GIVEN = re.compile(rb'"usage"\s*:\s*\{')  # and not null, which some servers put on every chunk
# A usage that ends its frame, and the frame that ends the chunk. A quote inside of text would have a backslash before.
_LAST_FIELD = re.compile(rb',\s*"usage"\s*:\s*(\{[^{}]*(?:\{[^{}]*\}[^{}]*)*\})\s*\}\r?\n\r?\n')


class _Choice(msgspec.Struct):
    delta: dict[str, Any] | None = None
    message: dict[str, Any] | None = None
    text: str | None = None


class _Part(msgspec.Struct):
    """What some events wrap: `response` of OpenAI's responses, `message` of Anthropic's messages."""

    usage: RawUsage | None = None
    service_tier: str | None = None


class _Event(msgspec.Struct):
    """The parts of a chunk, or of a whole answer, that metering reads."""

    object: str | None = None
    choices: list[_Choice] | None = None
    usage: RawUsage | None = None
    service_tier: str | None = None
    error: Any = None
    response: _Part | str | None = None  # a text in Ollama's answers, and in some servers' errors
    message: _Part | str | None = None
    prompt_eval_count: int | None = None
    eval_count: int | None = None
    warmpath: _Part | None = None  # what a provider of ours knows before the end
    x_groq: _Part | None = None  # Groq's, which has its usage here

    @property
    def counts(self) -> RawUsage | None:
        if self.usage is not None:
            return self.usage
        if self.prompt_eval_count is not None or self.eval_count is not None:
            return RawUsage(prompt_eval_count=self.prompt_eval_count, eval_count=self.eval_count)
        part = self.response or self.message or self.warmpath or self.x_groq
        return part.usage if isinstance(part, _Part) else None

    @property
    def tier(self) -> str | None:
        part = self.response or self.message
        if isinstance(part, _Part) and part.service_tier:
            return part.service_tier
        return self.service_tier or (self.usage.service_tier if self.usage is not None else None)


class _Uncounted(msgspec.Struct):
    """Of an event whose counts can not be read, the rest."""

    object: str | None = None
    choices: list[_Choice] | None = None
    error: Any = None


_decode_strictly = msgspec.json.Decoder(_Event).decode
_decode_leniently = msgspec.json.Decoder(_Event, strict=False).decode
_decode_uncounted = msgspec.json.Decoder(_Uncounted).decode
_decode_counts = msgspec.json.Decoder(RawUsage, strict=False).decode
_fields = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


def _decode(data: bytes) -> _Event:
    """Counts may be written as `12.0` or `"12"`; where they are no numbers at all, the event is as if it had none.

    Raises `msgspec.MsgspecError` for what is no event.
    """
    try:
        return _decode_strictly(data)
    except msgspec.ValidationError:
        pass
    try:
        return _decode_leniently(data)
    except msgspec.ValidationError:
        rest = _decode_uncounted(data)
        return _Event(object=rest.object, choices=rest.choices, error=rest.error)


class Meter:
    """Watches one reply.

    `complete`: it came to its own end, with `[DONE]` or a whole JSON body. `error`: instead, the upstream reported a
    failure in the reply itself. `service_tier`: the one in which it says that it was made. `strip_every_usage` is set
    where every chunk has counts that only we have asked for, and `is_estimated` where a count is not the engine's own.
    """

    __slots__ = (
        "_counted",
        "_counts",
        "_prompt_tokens_estimate",
        "_stream",
        "_strip",
        "_text_begun",
        "_uncounted",
        "_unread",
        "complete",
        "error",
        "is_estimated",
        "service_tier",
        "strip_every_usage",
    )

    def __init__(self, call: Call) -> None:
        self.complete = False
        self.error = False
        self.service_tier = call.service_tier
        self.strip_every_usage = False
        self.is_estimated = False
        self._stream = call.stream
        self._strip = not call.include_usage
        self._prompt_tokens_estimate = call.prompt_tokens_estimate
        self._counts: RawUsage | None = None
        self._unread: bytes | None = None  # newer counts, as JSON
        self._counted: Usage | None = None  # the newest in buckets, once somebody has asked
        self._uncounted = 0  # output tokens, estimated, since the engine last said how many there were
        self._text_begun = False

    def watch(self, chunk: bytes) -> bytes:
        """Take a chunk as `providers.base` defines it; return what the client gets: mostly the same object.

        Empty when the chunk was nothing but usage that the client did not ask for.
        """
        if (  # by `find`: to look for bytes, `in` takes half as long again
            self._text_begun
            and (chunk.find(b'"usage"') < 0 or not _USAGE_GIVEN.search(chunk))
            and chunk.find(b'"error"') < 0
            and chunk.find(b"[DONE]") < 0
        ):
            self._uncounted += chunk.count(b"\ndata:") + chunk.startswith(b"data:")
            return chunk
        if not self._stream:
            self._read_body(chunk)
            return chunk
        if self.strip_every_usage and self._text_begun and b'"choices":[{' in chunk:
            stripped = self._counted_text(chunk)
            if stripped is not None:
                return stripped
        frames = list(_frames(chunk))
        kept = [self._read_frame(frame) for frame in frames]
        return chunk if all(map(operator.is_, frames, kept)) else b"".join(kept)

    def _counted_text(self, chunk: bytes) -> bytes | None:
        """A chunk of one frame of text that ends with its counts, without them. None where it is anything else."""
        at = chunk.rfind(b'"usage"')
        last = _LAST_FIELD.fullmatch(chunk, chunk.rfind(b",", 0, at)) if at > 0 and b'"error"' not in chunk else None
        if last is None or chunk.find(b"\n\n", 0, last.start()) >= 0 or chunk.find(b"\n\r\n", 0, last.start()) >= 0:
            return None
        self._unread, self._counted, self._uncounted = last[1], None, 0
        return chunk[: last.start()] + chunk[last.end(1) :]

    @property
    def usage(self) -> Usage:
        """What the reply has consumed until now."""
        if self._counted is None:
            self._counted = self._count()
        if self._counted is None:
            prompt_tokens = self._prompt_tokens_estimate if self._uncounted or self.complete else 0
            return Usage(input_uncached=prompt_tokens, output=self._uncounted)
        if self._uncounted:
            output = self._counted.output + self._uncounted
            return msgspec.structs.replace(self._counted, output=output, exact=False)
        if self.is_estimated:
            return msgspec.structs.replace(self._counted, exact=False)
        return self._counted

    def _count(self) -> Usage | None:
        if self._unread is not None:
            unread, self._unread = self._unread, None
            try:
                self._counts = _decode_counts(unread)
            except (msgspec.MsgspecError, RecursionError):
                self._uncounted += 1  # what is no count leaves the one before, and is a token more by estimate
        return normalize_usage(self._counts) if self._counts is not None else None

    def _learn(self, counts: RawUsage) -> None:
        """The engine's newest word on how much there is."""
        if self._unread is None and self._counts is not None:
            counts = self._counts.updated(counts)
        self._counts, self._unread, self._counted, self._uncounted = counts, None, None, 0

    @property
    def lacks_engine_counts(self) -> bool:
        """Whether there is output, and the engine has not said how long the prompt was."""
        return self._uncounted > 0 and self._counts is None and self._unread is None

    def set_prompt_tokens(self, prompt_tokens: int) -> None:
        """How many tokens the prompt has by the model's tokenizer: better than a guess, where no engine has counted."""
        self._prompt_tokens_estimate = prompt_tokens

    def read_record(self, record: bytes) -> None:
        """What the engine has on record of an answer that ended early: its numbers count, nothing else does."""
        try:
            counts = _decode(record).counts
        except (msgspec.MsgspecError, RecursionError):
            return
        if counts is not None:
            self._learn(counts)

    def _read_frame(self, frame: bytes) -> bytes:
        """Learn from one frame; what the client gets of it."""
        data = b"\n".join(line[5:].strip() for line in frame.splitlines() if line.startswith(b"data:"))
        if not data:  # a comment, as servers send to keep a connection alive
            return frame
        if data == b"[DONE]":
            self.complete = not self.error
            return frame
        try:
            event = _decode(data)
        except (
            msgspec.MsgspecError,
            RecursionError,
        ):  # whether the client gets such a frame is the provider's decision
            self._uncounted += self._text_begun
            return frame
        if event.error or event.object == "error":
            self.error, self.complete = True, False
            return frame
        self.service_tier = event.tier or self.service_tier
        if event.choices:
            # From the first text on every frame counts as a token: which field of which server carries text need
            # not be known then, and the frame that only says why it finished makes the estimate one too high.
            self._text_begun = self._text_begun or any(_has_text(choice) for choice in event.choices)
            self._uncounted += self._text_begun
        if (counts := event.counts) is None:
            return frame
        self._learn(counts)
        if event.choices:
            return _without_usage(data) if self.strip_every_usage else frame
        return b"" if self._strip else frame

    def _read_body(self, body: bytes) -> None:
        try:
            event = _decode(body)
        except (msgspec.MsgspecError, RecursionError):
            return
        self.error = bool(event.error) or event.object == "error"
        self.complete = not self.error
        self.service_tier = event.tier or self.service_tier
        if (counts := event.counts) is not None:
            self._learn(counts)
        self._counted = self._count()
        if self._counted is None:
            self._uncounted = sum(_text_bytes(choice) for choice in event.choices or ()) // BYTES_PER_TOKEN


def _frames(chunk: bytes) -> Iterator[bytes]:
    """The event frames of a chunk, each with its blank line, so that joining them gives the chunk back."""
    start = 0
    for blank_line in _BLANK_LINE.finditer(chunk):
        yield chunk[start : blank_line.end()]
        start = blank_line.end()
    if start < len(chunk):
        yield chunk[start:]


def _without_usage(data: bytes) -> bytes:
    fields = _fields(data)
    fields.pop("usage", None)
    return b"data: %b\n\n" % msgspec.json.encode(fields)


def _has_text(choice: _Choice) -> bool:
    """Content, reasoning, refusal, tool calls: anything but the role is output."""
    return bool(choice.text) or any(value for name, value in (choice.delta or {}).items() if name != "role")


def _text_bytes(choice: _Choice) -> int:
    parts = [choice.text, *(value for name, value in (choice.message or {}).items() if name != "role")]
    return sum(len(part.encode() if isinstance(part, str) else msgspec.json.encode(part)) for part in parts if part)
