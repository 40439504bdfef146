"""Token metering: a `Meter` watches the chunks of one reply and reads the call's token usage from them.

For most chunks the meter only searches for a few bytes and parses no JSON, which takes about a microsecond per chunk.
It stores a few integers, however long the stream is. The gateway always requests usage from the deployment. If the
client did not request usage, the meter removes it from the reply: the frame that has nothing but usage, or the counts
in every chunk.

The usage that is billed depends on what the engine has reported:

  reported                            billed usage
  token counts                        exact: the engine's last counts. If an answer ended early, the counts may also
                                      come from the engine's usage record.
  token counts, then more text        estimate: the counts, and the tokens of the further text
  no counts, but output               estimate: the estimated prompt, and the tokens of the received text
  implausible or malformed counts     the same estimate. `implausible` says why (`gateway.billing.usage_bounds`)
  no counts and no output             estimate: nothing, since it is unknown whether the prompt was computed. If the
                                      client left, the estimated prompt (`bill_prompt`)

Received text is counted by its bytes, at the rate that the deployment's replies have taught (`TokenRates`), or by the
deployment's tokenizer if it has an endpoint for that. Frames are never counted:
servers put any number of tokens into one. A stream is parsed for that only if necessary
(`gateway.billing.received_text`).

`gateway.billing.receipts` prices the usage. docs/explanation/billing.md has the whole table.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

import msgspec

from gateway.billing.passed_usage import usage_of
from gateway.billing.received_text import ReceivedText
from gateway.billing.reply_events import (
    MalformedCounts,
    ReplyChoice,
    ReplyEvent,
    counts_in,
    decode_counts,
    decode_event,
    generated_text,
    has_text,
    text_bytes,
    without_usage,
)
from gateway.billing.usage_bounds import find_implausible, is_plausible_prompt
from gateway.deployments.token_rates import TokenRates
from gateway.policy import Deployment
from gateway.policy.deployments import ADDED_PROMPT_TOKENS
from gateway.providers.sse import UNREADABLE, data_of, is_done, split_frames
from gateway.providers.usage import RawUsage, read_usage
from gateway.types import Call, Operation, Usage

QUOTED_CHARACTERS = 300  # of an implausible usage object, in the receipt
_UNLEARNED_RATES = TokenRates()  # of answers that no deployment of this gateway has given
_USAGE_GIVEN = re.compile(rb'"usage"\s*:\s*\{')  # not null, which some engines put on every chunk
_NOT_TEXT = (b'"error"', b"[DONE]")  # a frame with one of these may contain more than text
_NOT_TEXT_OR_TIER = (*_NOT_TEXT, b'"service_tier"')
# A usage object that ends a frame and the chunk. The answer's text cannot match, since JSON escapes quotes in it.
_LAST_FIELD = re.compile(rb',\s*"usage"\s*:\s*(\{[^{}]*(?:\{[^{}]*\}[^{}]*)*\})\s*\}\r?\n\r?\n')


class Meter:
    """Meters the token usage of one reply.

    `complete` is true once the reply has ended normally: with `[DONE]`, or as a complete JSON body. `error` is true if
    the upstream reported a failure within the reply. `service_tier` is the tier that the reply names, or else the
    request's. The caller sets `strip_every_usage` if every chunk contains counts that the client did not request. The
    caller sets `is_estimated` if a count does not come from the engine itself. `text` has a stream's frames since the
    first text.
    """

    __slots__ = (
        "_added_prompt_tokens",
        "_answer_bytes",
        "_bytes_counted",
        "_call",
        "_choices",
        "_counted",
        "_counts",
        "_frame_bytes",
        "_implausible",
        "_is_preliminary",
        "_prompt_is_billed",
        "_prompt_tokens",
        "_rates",
        "_stream",
        "_strip",
        "_text_begun",
        "_tier_is_read",
        "_tokens_per_byte",
        "_unread",
        "_words",
        "complete",
        "error",
        "is_estimated",
        "service_tier",
        "strip_every_usage",
        "text",
    )

    def __init__(self, call: Call, deployment: Deployment | None = None) -> None:
        """`deployment` is the one that answers. If it is known only later, call `answered_by`."""
        self.complete = False
        self.error = False
        self.service_tier = call.service_tier
        self.strip_every_usage = False
        self.is_estimated = False
        self._call = call
        self._stream = call.stream
        self._strip = not call.include_usage
        self._added_prompt_tokens = ADDED_PROMPT_TOKENS if deployment is None else deployment.added_prompt_tokens
        self._rates = _UNLEARNED_RATES
        self._prompt_tokens: int | None = None  # as counted by the model's tokenizer; else the rates say how many
        self._tokens_per_byte: float | None = None  # the same, of the text
        self._prompt_is_billed = False
        self._counts: RawUsage | None = None
        self._unread: bytes | None = None  # newer counts than `_counts`, as JSON, not decoded yet
        self._counted: Usage | None = None  # the newest counts in buckets, cached
        self._words = b""  # the event that contains `_counts`, or the counts alone
        self._implausible: str | None = None
        self._is_preliminary = False  # the newest counts are those of a stream's beginning, as in `message_start`
        self.text = ReceivedText()  # in a stream's frames since the first text
        self._bytes_counted = 0  # of these frames, how many came with or before the newest counts
        self._frame_bytes = 0  # of a frame, without its text; as in the first frame
        self._text_begun = False
        self._tier_is_read = False  # most services name it in the first frame
        self._choices: list[ReplyChoice] = []  # of a complete answer
        self._answer_bytes = 0  # of a complete answer that cannot be read

    def answered_by(self, deployment: Deployment, rates: TokenRates | None = None) -> None:
        """Set the deployment that answers. Its bounds apply to its counts, and its rates to estimates."""
        self._added_prompt_tokens = deployment.added_prompt_tokens
        if rates is not None:
            self._rates, self._prompt_tokens, self._tokens_per_byte = rates, None, None

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
            self.text.add(chunk, chunk.count(b"\ndata:") + chunk.startswith(b"data:"))
            return chunk
        if not self._stream:
            self._read_body(chunk)
            return chunk
        if self.strip_every_usage and self._text_begun and b'"choices":[{' in chunk:
            stripped = self._counted_text(chunk)
            if stripped is not None:
                return stripped
        kept = self._read_frames(chunk)
        return chunk if kept == chunk else kept

    def _read_frames(self, chunk: bytes) -> bytes:
        """Meter frames, and return what the client gets of them. Reads one by one those that may have more than text.

        These are the frames up to the first text, and those from the first one with counts, an error or the end.
        """
        kept: list[bytes] = []
        at = 0
        for frame in split_frames(chunk):
            if self._text_begun:
                break
            kept.append(self._read_frame(frame))
            at += len(frame)
        others = _NOT_TEXT if self._tier_is_read else _NOT_TEXT_OR_TIER
        if self._text_begun and (end := _end_of_text(chunk, at, others)) > at:
            text, at = chunk[at:end], end
            self.text.add(text, text.count(b"\ndata:") + text.startswith(b"data:"))
            kept.append(text)
        return b"".join([*kept, *map(self._read_frame, split_frames(chunk[at:]))])

    def _counted_text(self, chunk: bytes) -> bytes | None:
        """Return a chunk without its counts, if it is a single text frame that ends with counts. None otherwise."""
        at = chunk.rfind(b'"usage"')
        last = _LAST_FIELD.fullmatch(chunk, chunk.rfind(b",", 0, at)) if at > 0 and b'"error"' not in chunk else None
        if last is None or chunk.find(b"\n\n", 0, last.start()) >= 0 or chunk.find(b"\n\r\n", 0, last.start()) >= 0:
            return None
        stripped = chunk[: last.start()] + chunk[last.end(1) :]
        self.text.add(stripped, 1)
        self._unread, self._counted, self._bytes_counted = last[1], None, self.text.received
        return stripped

    @property
    def usage(self) -> Usage:
        """The usage of the reply so far."""
        if self._counted is None:
            self._counted = self._count()
        counted, uncounted = self._counted, self.text.received - self._bytes_counted
        if counted is None:
            output = self._tokens_of(self.received_text_bytes)
            is_billed = output or self.complete or self._prompt_is_billed
            return Usage(input_uncached=self._prompt_tokens_estimate() if is_billed else 0, output=output)
        if uncounted and (more := self._tokens_of(self.text.text_bytes(uncounted))):
            return msgspec.structs.replace(counted, output=counted.output + more, exact=False)
        if self.is_estimated or (self._is_preliminary and not self.complete):
            return msgspec.structs.replace(counted, exact=False)
        return counted

    @property
    def is_uncounted(self) -> bool:
        """Whether the engine has sent no counts yet, so that `usage` is an estimate of the text."""
        return self._counts is None and self._unread is None and self._counted is None

    @property
    def implausible(self) -> str | None:
        """Why the engine's newest counts are not billed, with the counts as it sent them. None if they are billed."""
        if self._counted is None:
            self._counted = self._count()
        return self._implausible

    def _prompt_tokens_estimate(self) -> int:
        """The prompt's tokens, if the engine has not counted them."""
        if self._prompt_tokens is not None:
            return self._prompt_tokens
        estimate = self._call.input_tokens_estimate
        return estimate if self._call.media is not None else self._rates.prompt_tokens(estimate)

    def _tokens_of(self, text_bytes: int) -> int:
        """The tokens of received text, rounded up."""
        rate = self._rates.tokens_per_byte if self._tokens_per_byte is None else self._tokens_per_byte
        return math.ceil(text_bytes * rate)

    @property
    def received_text_bytes(self) -> int:
        """The bytes (UTF-8) of text received so far. Beyond the sample of a stream, in proportion."""
        if self._stream:
            return self.text.text_bytes()
        text = sum(len(part.encode(errors="replace")) for choice in self._choices for part in generated_text(choice))
        return text + self._answer_bytes

    @property
    def is_text_whole(self) -> bool:
        """Whether `received_text_bytes` is measured and not extrapolated."""
        return not self._stream or self.text.is_whole

    @property
    def text_sample(self) -> str:
        """The beginning of the received text, for the deployment's tokenizer. Empty if there is none."""
        if self._stream:
            return self.text.sample_text
        return "".join(text for choice in self._choices for text in generated_text(choice))

    def set_sample_tokens(self, tokens: int) -> None:
        """Count received text at the rate of `text_sample`, which has so many tokens by the model's tokenizer."""
        sample_bytes = len(self.text_sample.encode())
        if 0 < tokens <= sample_bytes:
            self._tokens_per_byte = tokens / sample_bytes

    def _received_tokens(self) -> int:
        """The most tokens that the received text can have: each has one byte at least."""
        if not self._stream:
            return sum(map(text_bytes, self._choices))
        return max(self.text.events, self.text.received - self.text.events * self._frame_bytes)

    def _count(self) -> Usage | None:
        """Return the engine's newest counts in buckets. None if there are none, or if they are not plausible."""
        if self._unread is not None:
            self._words, self._unread = self._unread, None
            try:
                self._counts, self._implausible = decode_counts(self._words), None
            except UNREADABLE:
                self._reject("malformed counts", self._words)
        reported = read_usage(self._counts) if self._counts is not None else None
        if reported is None:
            return None
        problem = find_implausible(
            self._call,
            reported,
            received_tokens=self._received_tokens,
            added_prompt_tokens=self._added_prompt_tokens,
        )
        if problem is None:
            return reported.usage()
        self._reject(problem, counts_in(self._words) or self._words)
        return None

    def _reject(self, problem: str, words: bytes) -> None:
        """Use no counts of this reply, until newer ones arrive."""
        self._counts = self._unread = self._counted = None
        self._implausible = f"{problem}: {_quoted(words)}"

    def _learn(self, event: ReplyEvent, data: bytes) -> bool:
        """Store the engine's newest counts. Returns whether the event has any, plausible or not."""
        if isinstance(event, MalformedCounts):
            self._reject("malformed counts", event.words)
            return True
        if (counts := event.counts) is None:
            return False
        if self._call.operation is Operation.EMBEDDING and counts.prompt_tokens is None and counts.input_tokens is None:
            counts = msgspec.structs.replace(counts, prompt_tokens=counts.total_tokens)  # Voyage; there is no output
        if self._unread is None and self._counts is not None:
            counts = self._counts.updated(counts)
        self._counts, self._words, self._bytes_counted = counts, data, self.text.received
        self._unread = self._counted = self._implausible = None
        self._is_preliminary = self._stream and (event.warmpath is not None or event.message is not None)
        return True

    @property
    def lacks_engine_counts(self) -> bool:
        """Whether the prompt is billed but the engine has not counted it. Its length is then an estimate."""
        usage = self.usage
        return self._counted is None and usage.total > 0

    def bill_prompt(self) -> None:
        """Bill the prompt although no output has arrived. Called if the client left while the prompt was computed."""
        self._prompt_is_billed = True

    def set_prompt_tokens(self, prompt_tokens: int) -> None:
        """Replace the estimated prompt length with a count by the model's tokenizer, if that is plausible."""
        if is_plausible_prompt(self._call, prompt_tokens, self._added_prompt_tokens):
            self._prompt_tokens = prompt_tokens
        else:
            self._implausible = f"the server's tokenizer counted {prompt_tokens} tokens in the prompt"

    def read_record(self, record: bytes) -> None:
        """Read the counts from the engine's usage record of an answer that ended early. Ignores a malformed record."""
        try:
            self._learn(decode_event(record), record)
        except UNREADABLE:
            return

    def _read_frame(self, frame: bytes) -> bytes:
        """Meter one frame. Returns the bytes that the client receives instead of the frame."""
        data = data_of(frame)
        if not data:  # a comment, which keeps the connection alive
            return frame
        if is_done(data):
            self.complete = not self.error
            return frame
        try:
            event = decode_event(data)
        except UNREADABLE:
            # Not JSON. The provider decides whether the client gets such frames.
            if words := counts_in(data):
                self._reject("malformed counts", words)
            if self._text_begun:
                self.text.add(frame, 1)
            return frame
        if event.error or event.object == "error":
            self.error, self.complete = True, False
            return frame
        if event.tier:
            self.service_tier, self._tier_is_read = event.tier, True
        if event.choices:
            self._read_choices(event.choices, frame)
        if not self._learn(event, data):
            return frame
        if event.choices:
            return without_usage(data) if self.strip_every_usage else frame
        return b"" if self._strip else frame

    def _read_choices(self, choices: list[ReplyChoice], frame: bytes) -> None:
        """Keep a frame, if it or an earlier one has text. So the meter need not know which fields have text."""
        if not self._text_begun:
            self._text_begun = any(map(has_text, choices))
            self._frame_bytes = max(0, len(frame) - sum(map(text_bytes, choices)))
        if self._text_begun:
            self.text.add(frame, 1)

    def _read_body(self, body: bytes) -> None:
        if self._call.passed is not None:
            self.complete = True
            self._counted = usage_of(self._call.passed, body)
            return
        try:
            event = decode_event(body)
        except UNREADABLE:
            if body.lstrip().startswith(b"{"):  # the provider passes it on, and some clients accept NaN in JSON
                self._answer_bytes = len(body)
                if words := counts_in(body):
                    self._reject("malformed counts", words)
            return
        self.error = bool(event.error) or event.object == "error"
        self.complete = not self.error
        self.service_tier = event.tier or self.service_tier
        self._choices = event.choices or []
        self._learn(event, body)
        self._counted = self._count()
        self._words = b""  # of up to megabytes


def _end_of_text(chunk: bytes, start: int, words: Sequence[bytes]) -> int:
    """The offset of the first frame from `start` on that contains one of `words` or counts. Only LF ends lines."""
    others = [at for word in words if (at := chunk.find(word, start)) >= 0]
    if usage := _USAGE_GIVEN.search(chunk, start):
        others.append(usage.start())
    blank_line = chunk.rfind(b"\n\n", start, min(others, default=len(chunk)))
    return blank_line + 2 if blank_line >= 0 else start


def _quoted(words: bytes) -> str:
    """Return a server's words on one line of printable ASCII, cut to `QUOTED_CHARACTERS`."""
    text = words[:QUOTED_CHARACTERS].decode(errors="replace").encode("unicode_escape").decode()
    return text if len(text) <= QUOTED_CHARACTERS else f"{text[:QUOTED_CHARACTERS]}..."
