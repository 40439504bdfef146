"""Token metering: a `Meter` watches the chunks of one reply and reads the call's token usage from them.

For most chunks the meter only searches for a few bytes and parses no JSON, which takes about a microsecond per chunk.
It stores a few integers, however long the stream is. The gateway always requests usage from the deployment. If the
client did not request usage, the meter removes it from the reply: the frame that has nothing but usage, or the counts
in every chunk.

The usage that is billed depends on what the engine has reported:

  reported                            billed usage
  token counts                        exact: the engine's last counts. If an answer ended early, the counts may also
                                      come from the engine's usage record.
  token counts, then more text        estimate: the counts, and one token per further frame
  no counts, but output               estimate: the estimated prompt, and one token per frame of text
  no counts and no output             estimate: nothing, since it is unknown whether the prompt was computed

`gateway.billing.receipts` prices the usage. docs/explanation/billing.md has the whole table.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Iterator
from typing import Any

import msgspec

from gateway.providers.usage import RawUsage, normalize_usage
from gateway.types import Call, Usage

BYTES_PER_TOKEN = 4  # in English text; used to estimate answers for which the engine reports no counts
_BLANK_LINE = re.compile(rb"\n\r?\n")  # ends a frame; JSON strings escape newlines, so no frame contains one
_USAGE_GIVEN = re.compile(rb'"usage"\s*:\s*\{')  # not null, which some engines put on every chunk
# A usage object that ends a frame and the chunk. The answer's text cannot match, since JSON escapes quotes in it.
_LAST_FIELD = re.compile(rb',\s*"usage"\s*:\s*(\{[^{}]*(?:\{[^{}]*\}[^{}]*)*\})\s*\}\r?\n\r?\n')


class _Choice(msgspec.Struct):
    """One choice of a chat chunk (`delta`), a chat answer (`message`) or a text completion (`text`)."""

    delta: dict[str, Any] | None = None
    message: dict[str, Any] | None = None
    text: str | None = None


class _Wrapped(msgspec.Struct):
    """An object inside an event that contains the usage: OpenAI's `response`, or Anthropic's `message`."""

    usage: RawUsage | None = None
    service_tier: str | None = None


class _Event(msgspec.Struct):
    """The fields that metering reads of a stream's chunk or of a complete, non-streaming answer."""

    object: str | None = None
    choices: list[_Choice] | None = None
    usage: RawUsage | None = None
    service_tier: str | None = None
    error: Any = None
    response: _Wrapped | str | None = None  # a string in Ollama's answers, and in some engines' errors
    message: _Wrapped | str | None = None
    prompt_eval_count: int | None = None
    eval_count: int | None = None
    warmpath: _Wrapped | None = None  # set by the gateway's own provider adapters if they know the usage before the end
    x_groq: _Wrapped | None = None  # where Groq puts its usage

    @property
    def counts(self) -> RawUsage | None:
        """The engine's token counts, from the field of the event that contains them. None if no field does."""
        if self.usage is not None:
            return self.usage
        if self.prompt_eval_count is not None or self.eval_count is not None:
            return RawUsage(prompt_eval_count=self.prompt_eval_count, eval_count=self.eval_count)
        wrapped = self.response or self.message or self.warmpath or self.x_groq
        return wrapped.usage if isinstance(wrapped, _Wrapped) else None

    @property
    def tier(self) -> str | None:
        """The service tier that the event names, if any."""
        wrapped = self.response or self.message
        if isinstance(wrapped, _Wrapped) and wrapped.service_tier:
            return wrapped.service_tier
        return self.service_tier or (self.usage.service_tier if self.usage is not None else None)


class _EventWithoutCounts(msgspec.Struct):
    """The other fields of an event whose counts are malformed."""

    object: str | None = None
    choices: list[_Choice] | None = None
    error: Any = None


_decode_strictly = msgspec.json.Decoder(_Event).decode
_decode_leniently = msgspec.json.Decoder(_Event, strict=False).decode
_decode_uncounted = msgspec.json.Decoder(_EventWithoutCounts).decode
_decode_counts = msgspec.json.Decoder(RawUsage, strict=False).decode
_fields = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


def _decode(data: bytes) -> _Event:
    """Decode an event. Counts may be written as `12.0` or `"12"`. Counts that are not numbers are ignored.

    Raises `msgspec.MsgspecError` if the data is not an event.
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
    """Meters the token usage of one reply.

    `complete` is true once the reply has ended normally: with `[DONE]`, or as a complete JSON body. `error` is true if
    the upstream reported a failure within the reply. `service_tier` is the tier that the reply names, or else the
    request's. The caller sets `strip_every_usage` if every chunk contains counts that the client did not request. The
    caller sets `is_estimated` if a count does not come from the engine itself.
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
        self._unread: bytes | None = None  # newer counts than `_counts`, as JSON, not decoded yet
        self._counted: Usage | None = None  # the newest counts in buckets, cached
        self._uncounted = 0  # estimated output tokens since the engine's last counts
        self._text_begun = False

    def watch(self, chunk: bytes) -> bytes:
        """Meter a chunk (see `gateway.providers.base`). Returns the bytes for the client, usually the same object.

        Returns empty bytes if the chunk contains only usage that the client did not request.
        """
        if (  # `find`, since `in` takes 1.5 times as long on bytes
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
        """Return a chunk without its counts, if it is a single text frame that ends with counts. None otherwise."""
        at = chunk.rfind(b'"usage"')
        last = _LAST_FIELD.fullmatch(chunk, chunk.rfind(b",", 0, at)) if at > 0 and b'"error"' not in chunk else None
        if last is None or chunk.find(b"\n\n", 0, last.start()) >= 0 or chunk.find(b"\n\r\n", 0, last.start()) >= 0:
            return None
        self._unread, self._counted, self._uncounted = last[1], None, 0
        return chunk[: last.start()] + chunk[last.end(1) :]

    @property
    def usage(self) -> Usage:
        """The usage of the reply so far."""
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
                self._uncounted += 1  # malformed: keep the previous counts, and add one estimated token
        return normalize_usage(self._counts) if self._counts is not None else None

    def _learn(self, counts: RawUsage) -> None:
        """Store the engine's newest counts."""
        if self._unread is None and self._counts is not None:
            counts = self._counts.updated(counts)
        self._counts, self._unread, self._counted, self._uncounted = counts, None, None, 0

    @property
    def lacks_engine_counts(self) -> bool:
        """Whether the reply has output but no counts from the engine. The prompt's length is then an estimate."""
        return self._uncounted > 0 and self._counts is None and self._unread is None

    def set_prompt_tokens(self, prompt_tokens: int) -> None:
        """Replace the estimated prompt length with a count by the model's tokenizer."""
        self._prompt_tokens_estimate = prompt_tokens

    def read_record(self, record: bytes) -> None:
        """Read the counts from the engine's usage record of an answer that ended early. Ignores a malformed record."""
        try:
            counts = _decode(record).counts
        except (msgspec.MsgspecError, RecursionError):
            return
        if counts is not None:
            self._learn(counts)

    def _read_frame(self, frame: bytes) -> bytes:
        """Meter one frame. Returns the bytes that the client receives instead of the frame."""
        data = b"\n".join(line[5:].strip() for line in frame.splitlines() if line.startswith(b"data:"))
        if not data:  # a comment, which keeps the connection alive
            return frame
        if data == b"[DONE]":
            self.complete = not self.error
            return frame
        try:
            event = _decode(data)
        except (msgspec.MsgspecError, RecursionError):
            # Not JSON. The provider decides whether the client gets such frames.
            self._uncounted += self._text_begun
            return frame
        if event.error or event.object == "error":
            self.error, self.complete = True, False
            return frame
        self.service_tier = event.tier or self.service_tier
        if event.choices:
            # After the first text, every frame counts as one token, so the meter need not know which field has an
            # engine's text. The estimate is one too high, because the frame with only the finish reason counts too.
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
    """Split a chunk into its event frames. Each includes the blank line after it, so joining them gives the chunk."""
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
    """Return whether a choice has output: content, reasoning, a refusal, tool calls, or anything except the role."""
    return bool(choice.text) or any(value for name, value in (choice.delta or {}).items() if name != "role")


def _text_bytes(choice: _Choice) -> int:
    parts = [choice.text, *(value for name, value in (choice.message or {}).items() if name != "role")]
    return sum(len(part.encode() if isinstance(part, str) else msgspec.json.encode(part)) for part in parts if part)
