"""What a call consumed and what it cost: a `Meter` watches the reply go by, `make_receipt` writes down the result.

The meter scans bytes and parses nothing on the ordinary path: a chunk of text costs about a microsecond, and a
stream of any length a few integers of state. The upstream is always asked for usage; the frame that carries only
usage is taken out again for a client that did not ask.

What is billed, by the way a call ended:

  the engine counted                 its numbers, exact; the last ones win where every chunk has them; also of an
                                     answer that ended early, where the engine keeps a record of it
  text after the engine's last word  its numbers, and one token per further frame; an estimate
  the engine said nothing            the prompt's estimate, and one token per frame of text; an estimate
  no output at all                   nothing, as an estimate: whether the prompt was computed is not known
  no deployment answered             nothing, at a cost of zero
  answered from the response cache   the tokens of the stored answer, at a cost of zero
"""

from __future__ import annotations

import functools
import re
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec

from gateway.ids import new_event_id
from gateway.money import text_of
from gateway.policy import Deployment, Price
from gateway.types import Attempt, AttemptRow, Call, Marks, Outcome, Receipt, Usage

BYTES_PER_TOKEN = 4  # of English text, for answers whose engine did not count
_BLANK_LINE = re.compile(rb"\n\r?\n")  # ends a frame; JSON has no raw newline, so text can not imitate it
_USAGE_GIVEN = re.compile(rb'"usage"\s*:\s*\{')  # and not null, which some servers put on every chunk


class _PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None
    cache_write_tokens: int | None = None


class _CompletionDetails(msgspec.Struct):
    reasoning_tokens: int | None = None


class _Counts(msgspec.Struct):
    """`usage` of the OpenAI dialect. The details are parts of the counts; embeddings have no completion."""

    prompt_tokens: int = 0
    completion_tokens: int | None = None
    total_tokens: int | None = None
    prompt_tokens_details: _PromptDetails | None = None
    completion_tokens_details: _CompletionDetails | None = None


class _Choice(msgspec.Struct):
    delta: dict[str, Any] | None = None
    message: dict[str, Any] | None = None
    text: str | None = None


class _Event(msgspec.Struct):
    """The parts of a chunk, or of a whole answer, that metering reads."""

    object: str | None = None
    choices: list[_Choice] | None = None
    usage: _Counts | None = None
    error: Any = None


_decode = msgspec.json.Decoder(_Event).decode


class Meter:
    """Watches one reply.

    `complete`: it came to its own end, with `[DONE]` or a whole JSON body. `error`: instead, the upstream reported a
    failure in the reply itself.
    """

    __slots__ = (
        "_counted",
        "_counts",
        "_prompt_tokens_estimate",
        "_stream",
        "_strip",
        "_text_begun",
        "_uncounted",
        "complete",
        "error",
    )

    def __init__(self, call: Call) -> None:
        self.complete = False
        self.error = False
        self._stream = call.stream
        self._strip = not call.include_usage
        self._prompt_tokens_estimate = call.prompt_tokens_estimate
        self._counts: _Counts | None = None
        self._counted: Usage | None = None  # the same in buckets, once somebody has asked
        self._uncounted = 0  # output tokens, estimated, since the engine last said how many there were
        self._text_begun = False

    def watch(self, chunk: bytes) -> bytes:
        """Take a chunk as `providers.base` defines it; return what the client gets: mostly the same object.

        Empty when the chunk was nothing but usage that the client did not ask for.
        """
        if (
            self._text_begun
            and not (b'"usage"' in chunk and _USAGE_GIVEN.search(chunk))
            and b'"error"' not in chunk
            and b"[DONE]" not in chunk
        ):
            self._uncounted += chunk.count(b"\ndata:") + chunk.startswith(b"data:")
            return chunk
        if not self._stream:
            self._read_body(chunk)
            return chunk
        frames = list(_frames(chunk))
        kept = [frame for frame in frames if self._read_frame(frame)]
        return chunk if len(kept) == len(frames) else b"".join(kept)

    @property
    def usage(self) -> Usage:
        """What the reply has consumed until now."""
        if self._counts is None:
            prompt_tokens = self._prompt_tokens_estimate if self._uncounted or self.complete else 0
            return Usage(input_uncached=prompt_tokens, output=self._uncounted)
        if self._counted is None:
            self._counted = _buckets(self._counts)
        if self._uncounted:
            output = self._counted.output + self._uncounted
            return msgspec.structs.replace(self._counted, output=output, exact=False)
        return self._counted

    def watch_record(self, record: bytes) -> None:
        """What the engine has on record of an answer that ended early: its numbers count, nothing else does."""
        try:
            counts = _decode(record).usage
        except msgspec.MsgspecError:
            return
        if counts is not None:
            self._counts, self._counted, self._uncounted = counts, None, 0

    def _read_frame(self, frame: bytes) -> bool:
        """Learn from one frame; False where the client must not get it."""
        data = b"\n".join(line[5:].strip() for line in frame.splitlines() if line.startswith(b"data:"))
        if not data:  # a comment, as servers send to keep a connection alive
            return True
        if data == b"[DONE]":
            self.complete = not self.error
            return True
        try:
            event = _decode(data)
        except msgspec.MsgspecError:  # whether the client gets such a frame is the provider's decision
            self._uncounted += self._text_begun
            return True
        if event.error is not None or event.object == "error":
            self.error, self.complete = True, False
            return True
        if event.choices:
            # From the first text on every frame counts as a token: which field of which server carries text need
            # not be known then, and the frame that only says why it finished makes the estimate one too high.
            self._text_begun = self._text_begun or any(_has_text(choice) for choice in event.choices)
            self._uncounted += self._text_begun
        if event.usage is None:
            return True
        self._counts, self._counted, self._uncounted = event.usage, None, 0
        return bool(event.choices) or not self._strip

    def _read_body(self, body: bytes) -> None:
        try:
            event = _decode(body)
        except msgspec.MsgspecError:
            return
        self.error = event.error is not None or event.object == "error"
        self.complete = not self.error
        self._counts = event.usage
        if event.usage is None:
            self._uncounted = sum(_text_bytes(choice) for choice in event.choices or ()) // BYTES_PER_TOKEN


def _frames(chunk: bytes) -> Iterator[bytes]:
    """The event frames of a chunk, each with its blank line, so that joining them gives the chunk back."""
    start = 0
    for blank_line in _BLANK_LINE.finditer(chunk):
        yield chunk[start : blank_line.end()]
        start = blank_line.end()
    if start < len(chunk):
        yield chunk[start:]


def _has_text(choice: _Choice) -> bool:
    """Content, reasoning, refusal, tool calls: anything but the role is output."""
    return bool(choice.text) or any(value for name, value in (choice.delta or {}).items() if name != "role")


def _text_bytes(choice: _Choice) -> int:
    parts = [choice.text, *(value for name, value in (choice.message or {}).items() if name != "role")]
    return sum(len(part.encode() if isinstance(part, str) else msgspec.json.encode(part)) for part in parts if part)


def _buckets(counts: _Counts) -> Usage:
    """Overlapping counts -> buckets that do not overlap. Counts that contradict each other are not called exact."""
    prompt, output = counts.prompt_tokens, counts.completion_tokens or 0
    prompt_details = counts.prompt_tokens_details or _PromptDetails()
    cache_read, cache_write = prompt_details.cached_tokens or 0, prompt_details.cache_write_tokens or 0
    reasoning = (counts.completion_tokens_details or _CompletionDetails()).reasoning_tokens or 0
    total = counts.total_tokens
    if reasoning > 0 and total == prompt + output + reasoning:
        output += reasoning  # some servers (xAI, Gemini) count thinking beside the answer; only the total tells
    agree = (
        min(prompt, output, cache_read, cache_write, reasoning) >= 0
        and cache_read + cache_write <= prompt
        and reasoning <= output
        and total in (None, prompt + output)
    )
    prompt, output = max(prompt, 0), max(output, 0)
    cache_read = min(max(cache_read, 0), prompt)
    cache_write = min(max(cache_write, 0), prompt - cache_read)
    return Usage(
        input_uncached=prompt - cache_read - cache_write,
        cache_read=cache_read,
        cache_write=cache_write,
        output=output,
        reasoning=min(max(reasoning, 0), output),
        exact=agree,
    )


def cost_of(usage: Usage, price: Price | None) -> int | None:
    """In `money`'s atoms. None without a price. Writing a cache costs what computing the tokens costs."""
    if price is None:
        return None
    computed, cached, output = price.atoms
    return (usage.input_uncached + usage.cache_write) * computed + usage.cache_read * cached + usage.output * output


def bill_of(usage: Usage, deployment: Deployment | None, *, from_cache: bool = False) -> int | None:
    """What a call costs, in atoms; None where that is not known. `deployment` is the one whose work is billed."""
    if from_cache or (deployment is None and not usage.total):
        return 0
    return cost_of(usage, deployment.price if deployment else None)


def make_receipt(
    call: Call,
    usage: Usage,
    *,
    outcome: Outcome,
    marks: Marks,
    cost: int | None,
    attempts: Sequence[Attempt] = (),
    deployment: Deployment | None = None,
    from_cache: bool = False,
) -> Receipt:
    """The record of a call that has ended. `deployment` and `cost` are those of `bill_of`."""
    price = deployment.price if deployment else None
    price_input, price_cached_input, price_output = price.texts if price else (None, None, None)
    return Receipt(
        event_id=new_event_id(),
        call_id=call.id,
        tenant=call.principal.tenant.name,
        key_id=call.principal.key_id,
        end_user=call.end_user,
        operation=call.operation.value,
        model_asked=call.asked_model,
        model_served=deployment.model if deployment else None,
        deployment=deployment.name if deployment else None,
        latency_class=call.class_name,
        service_tier=call.service_tier,
        started=rfc3339(marks.started_ns),
        finished=rfc3339(marks.ended_ns or time.time_ns()),
        ttft_seconds=(marks.first_chunk_ns - marks.started_ns) / 1e9 if marks.first_chunk_ns else None,
        outcome=outcome.value,
        source="cache" if from_cache else "engine" if usage.exact else "estimate",
        exact=usage.exact,
        input_uncached=usage.input_uncached,
        cache_read=usage.cache_read,
        cache_write=usage.cache_write,
        output=usage.output,
        reasoning=usage.reasoning,
        price_version=price.version if price else None,
        price_input=price_input,
        price_cached_input=price_cached_input,
        price_output=price_output,
        cost=None if cost is None else text_of(cost),
        currency=price.currency if price else None,
        attempts=tuple([_attempt_row(attempt) for attempt in attempts]),
        policy_hash=call.policy.hash,
        trace_id=f"{call.trace.trace_id:032x}",
    )


def rfc3339(time_ns: int) -> str:
    """UTC with microseconds, always of the same length: the order of the texts is the order of the times."""
    seconds, rest_ns = divmod(time_ns, 1_000_000_000)
    return f"{_whole_seconds(seconds)}.{rest_ns // 1000:06d}Z"


@functools.lru_cache(maxsize=64)  # a receipt has half a dozen times, mostly of the same few seconds
def _whole_seconds(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()[:19]


def _attempt_row(attempt: Attempt) -> AttemptRow:
    return AttemptRow(
        attempt.deployment,
        attempt.outcome,
        attempt.status,
        rfc3339(attempt.started_ns),
        rfc3339(attempt.ended_ns),
        f"{attempt.span_id:016x}",
        attempt.predicted_cached_tokens,
    )
