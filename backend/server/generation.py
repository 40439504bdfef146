"""The sequences of one HTTP request on their way through the engine. READ FIRST.

    async with Generation(serving, exchange, task) as generation:      submitted, all or none
        async for delta in generation.deltas():                        text as it comes, of all choices
            ...

Leaving the block, however it is left, gives up in the engine what has not ended, counts how every sequence ended,
and records the request's spans. The engine stops at eos, stop token ids and max_tokens; stop sequences are found here,
in the text, and end the request in the engine by an abort.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from backend.engine.detokenizer import Detokenizer
from backend.engine.errors import EngineError
from backend.engine.request import Constraint, FinishReason, Request, SamplingParams, Status, StepOutput, TokenLogprob
from backend.parsers.base import Event, Text
from backend.parsers.reply import ReplyParser
from backend.server import semconv
from backend.server.asgi import Exchange
from backend.server.errors import ApiError, DeadlineExceeded, EngineFailure, InvalidRequest
from backend.server.metrics import Completed
from backend.server.records import Usage
from backend.server.serving import Serving
from backend.server.tracing import NANOSECONDS, Attributes, Marks, RequestRecord, stages


@dataclass(frozen=True, slots=True)
class Task:
    """What is asked of the engine: every prompt once per member of `samplings`, one for each choice."""

    operation: str  # of the GenAI conventions: chat, text_completion, embeddings
    prompts: list[list[int]]
    samplings: list[SamplingParams]
    stop: list[str] = field(default_factory=list)
    grammar: Constraint | None = None
    make_parser: Callable[[], ReplyParser] | None = None  # for each choice one; None: an answer is text
    skip_special_tokens: bool = True
    include_stop_string: bool = False
    continues_prompt: bool = False  # whether the text of an answer goes on with that of its prompt
    cache_salt: str = ""
    priority: int = 0
    pooling: bool = False


@dataclass(frozen=True, slots=True)
class Delta:
    """What one step added to one choice. The last one of a choice carries `finish_reason`."""

    index: int
    text: str
    logprobs: tuple[TokenLogprob, ...]
    finish_reason: str | None
    events: tuple[Event, ...] = ()  # what the text is made of: without a parser, text
    token_ids: tuple[int, ...] = ()  # those of the step, with the one that ended the answer, which has no text
    stop_reason: int | str | None = None  # the stop string or token id of the request's own that ended the answer
    prompt_logprobs: tuple[TokenLogprob, ...] | None = None  # with a choice's first, where asked for
    embedding: tuple[float, ...] | None = None


class Generation:
    """Raises InvalidRequest for more sequences than the engine ever has."""

    def __init__(self, serving: Serving, exchange: Exchange, task: Task) -> None:
        self._serving = serving
        self._exchange = exchange
        self._task = task
        self._submitted_ns = 0
        self._deltas: AsyncGenerator[Delta] | None = None
        # A client may send the same x-request-id again, with a retry or a second attempt; the engine's ids are unique.
        self.id = f"{exchange.request_id}-{secrets.token_hex(4)}"
        choices = [(prompt, sampling) for prompt in task.prompts for sampling in task.samplings]
        if len(choices) > serving.max_sequences:
            raise InvalidRequest(
                f"This server takes at most {serving.max_sequences} answers at once; {len(choices)} are asked for.",
                param="n" if len(task.samplings) > 1 else "prompt",
            )
        self.sequences = [
            _Sequence(serving, exchange, task, i, f"{self.id}-{i}", prompt, sampling)
            for i, (prompt, sampling) in enumerate(choices)
        ]
        for i, sequence in enumerate(self.sequences):
            sequence.request.prompt_tally = self.sequences[i - i % len(task.samplings)].request.prompt_tally

    async def __aenter__(self) -> Self:
        self._submitted_ns = time.time_ns()
        try:
            for sequence in self.sequences:
                sequence.submit()
        except ApiError:
            for sequence in self.sequences:
                sequence.abort()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._deltas is not None:
            await self._deltas.aclose()
        cut_short = any(sequence.is_cut_short for sequence in self.sequences)
        for sequence in self.sequences:
            sequence.close(failed=isinstance(error, ApiError))
        marks = self._marks()
        # What was cut short goes on until the engine hears of it, and is then what the engine's counters say.
        self._serving.records.add(self._exchange.request_id, self._usage_in_the_end if cut_short else self.usage)
        if error is None:
            self._measure(marks)
        self._serving.tracer.record(self._record(marks, error))

    def deltas(self) -> AsyncIterator[Delta]:
        """All that the sequences say, once. Raises EngineFailure if the engine fails one."""
        first, *others = (sequence.deltas() for sequence in self.sequences)
        self._deltas = _merged([first, *others]) if others else first
        return self._deltas

    @property
    def usage(self) -> Usage:
        """So far. A prompt counts once, whatever the number of choices made from it, and so do its cached tokens."""
        firsts = self.sequences[:: len(self._task.samplings)]
        return Usage(
            prompt_tokens=sum(len(prompt) for prompt in self._task.prompts),
            completion_tokens=sum(sequence.num_tokens for sequence in self.sequences),
            cached_tokens=sum(sequence.num_cached_tokens for sequence in firsts),
            reasoning_tokens=sum(sequence.num_reasoning_tokens for sequence in self.sequences),
        )

    def _usage_in_the_end(self) -> Usage | None:
        """As `vllm:prompt_tokens` and `vllm:generation_tokens` have counted it; None while the engine works on it.

        A prompt that was not computed to its end has not been counted, whatever was computed of it.
        """
        if any(sequence.request.status is not Status.FINISHED for sequence in self.sequences):
            return None
        choices = len(self._task.samplings)
        groups = [self.sequences[i : i + choices] for i in range(0, len(self.sequences), choices)]
        counted = [group[0].request for group in groups if any(each.request.timing.first_token for each in group)]
        return Usage(
            prompt_tokens=sum(request.num_prompt_tokens for request in counted),
            completion_tokens=sum(sequence.num_tokens_in_the_end for sequence in self.sequences),
            cached_tokens=sum(request.num_cached_tokens for request in counted),
        )

    def _measure(self, marks: Marks) -> None:
        lengths = [sequence.num_tokens for sequence in self.sequences]
        self._serving.metrics.completed(
            Completed(
                e2e_seconds=(marks.ended_ns - marks.received_ns) / NANOSECONDS,
                stage_seconds={name: (end - start) / NANOSECONDS for name, start, end in stages(marks)},
                usage=self.usage,
                num_choices=len(self._task.samplings),
                max_tokens=0 if self._task.pooling else self._task.samplings[0].max_tokens,
                longest_choice=max(lengths),
                later_tokens=sum(max(0, length - 1) for length in lengths),
                num_preemptions=sum(sequence.num_preemptions for sequence in self.sequences),
            )
        )

    def _record(self, marks: Marks, error: BaseException | None) -> RequestRecord:
        return RequestRecord(
            marks=marks,
            headers=self._exchange.headers,
            attributes=self._attributes(error),
            prefill=self._prefill_attributes(),
            decode={
                semconv.OUTPUT_TOKENS: self.usage.completion_tokens,
                semconv.PREEMPTIONS: sum(sequence.num_preemptions for sequence in self.sequences),
            },
            error=None if error is None else str(error) or type(error).__name__,
        )

    def _marks(self) -> Marks:
        """Of several sequences, the stages of all together: the first that began, the last that ended."""
        timings = [sequence.request.timing for sequence in self.sequences]
        return Marks(
            received_ns=self._exchange.received_ns,
            submitted_ns=self._submitted_ns,
            scheduled_ns=_earliest_ns([timing.scheduled for timing in timings]),
            # An embedding is ready when its prompt is: it has neither tokens nor a decode.
            first_token_ns=0 if self._task.pooling else _earliest_ns([timing.first_token for timing in timings]),
            last_token_ns=max(sequence.last_token_ns for sequence in self.sequences),
            ended_ns=time.time_ns(),
        )

    def _attributes(self, error: BaseException | None) -> Attributes:
        sampling = self._task.samplings[0]
        usage = self.usage
        attributes: dict[str, str | int | float | list[str]] = {
            semconv.OPERATION_NAME: self._task.operation,
            semconv.PROVIDER_NAME: "warmpath",
            semconv.REQUEST_ID: self.id,
            semconv.REQUEST_MODEL: self._serving.model.name,
            semconv.RESPONSE_MODEL: self._serving.model.name,
            semconv.USAGE_INPUT_TOKENS: usage.prompt_tokens,
            semconv.USAGE_OUTPUT_TOKENS: usage.completion_tokens,
            semconv.USAGE_CACHE_READ_INPUT_TOKENS: usage.cached_tokens,
            semconv.RESPONSE_FINISH_REASONS: [sequence.finish_reason for sequence in self.sequences],
        }
        if not self._task.pooling:
            attributes |= {
                semconv.REQUEST_CHOICE_COUNT: len(self._task.samplings),
                semconv.REQUEST_MAX_TOKENS: sampling.max_tokens,
                semconv.REQUEST_TEMPERATURE: sampling.temperature,
                semconv.REQUEST_TOP_P: sampling.top_p,
            }
        if error is not None:
            attributes[semconv.ERROR_TYPE] = type(error).__name__
        return attributes

    def _prefill_attributes(self) -> Attributes:
        cached = sum(sequence.num_cached_tokens for sequence in self.sequences)
        total = sum(len(sequence.request.prompt_token_ids) for sequence in self.sequences)
        return {semconv.CACHED_TOKENS: cached, semconv.COMPUTED_TOKENS: total - cached}


class _Sequence:
    """One prompt and the choice that grows from it."""

    def __init__(
        self,
        serving: Serving,
        exchange: Exchange,
        task: Task,
        index: int,
        request_id: str,
        prompt: list[int],
        sampling: SamplingParams,
    ) -> None:
        self.request = Request(
            request_id,
            prompt,
            sampling,
            cache_salt=task.cache_salt,
            session_id=exchange.session_id,
            priority=task.priority,
            pooling=task.pooling,
            deadline=exchange.deadline(),
            grammar=task.grammar.start() if task.grammar else None,
        )
        self.num_tokens = 0
        self.num_reasoning_tokens = 0
        self.num_cached_tokens = 0
        self.num_preemptions = 0
        self.last_token_ns = 0
        self.finish_reason = ""  # empty: not ended yet
        self._serving = serving
        self._received_ns = exchange.received_ns
        self._index = index
        self._shows_stop = task.include_stop_string
        self._detokenizer = Detokenizer(
            serving.model.codec.tokenizer,
            task.stop,
            skip_special_tokens=task.skip_special_tokens,
            include_stop_string=task.include_stop_string,
            min_tokens=sampling.min_tokens,
            prompt_token_ids=prompt if task.continues_prompt else (),
        )
        self._parser = task.make_parser() if task.make_parser else None
        self._outputs: AsyncIterator[StepOutput] | None = None

    def submit(self) -> None:
        self._outputs = self._serving.submit(self.request)

    async def deltas(self) -> AsyncGenerator[Delta]:
        assert self._outputs is not None, "not submitted"
        try:
            async for output in self._outputs:
                self._note(output)
                yield self._delta(output)
                if self.finish_reason:
                    return
        except EngineError as error:
            raise EngineFailure(error.message) from error
        raise EngineFailure("The engine ended this request without an answer.")

    def close(self, *, failed: bool) -> None:
        if not self.finish_reason:
            self.finish_reason = FinishReason.ERROR.value if failed else FinishReason.ABORT.value
            self.abort()
        self._serving.metrics.finished(self.finish_reason)

    @property
    def num_tokens_in_the_end(self) -> int:
        """Those of the last step, too, whose output nobody was there to take."""
        return self.request.num_output_tokens if self.is_cut_short else self.num_tokens

    @property
    def is_cut_short(self) -> bool:
        """Whether there is no answer, or not yet: its client left, its deadline is over, or its place is another's."""
        return self.finish_reason not in (FinishReason.STOP.value, FinishReason.LENGTH.value)

    def abort(self) -> None:
        """Safe at any time: the engine shrugs at what has ended, and at what it never had."""
        self._serving.engine.abort(self.request.request_id)

    def _note(self, output: StepOutput) -> None:
        self.num_cached_tokens = output.num_cached_tokens
        self.num_preemptions = output.num_preemptions

    def _count(self, count: int) -> None:
        if not count:
            return
        now_ns = time.time_ns()
        if not self.num_tokens:
            self._serving.metrics.first_token((now_ns - self._received_ns) / NANOSECONDS)
        else:
            self._serving.metrics.tokens((now_ns - self.last_token_ns) / NANOSECONDS, count)
        self.num_tokens += count
        self.last_token_ns = now_ns

    def _delta(self, output: StepOutput) -> Delta:
        reason = output.finish_reason
        if reason is FinishReason.DEADLINE:
            self.finish_reason = reason.value
            raise DeadlineExceeded("The request's deadline came before the end of its answer.")
        if reason is FinishReason.DISPLACED:
            self.finish_reason = reason.value
            raise self._serving.overloaded("The queue is full, and more urgent work has taken this request's place.")
        if reason in (FinishReason.ERROR, FinishReason.ABORT):
            raise EngineFailure(output.error or "The engine gave this request up.")
        # The token that made the engine stop is told and counted, but its text is not shown unless asked for.
        shown = len(output.new_token_ids) - (reason is FinishReason.STOP and not self._shows_stop)
        before = self._detokenizer.num_tokens
        text = self._detokenizer.push(output.new_token_ids[:shown])
        count = len(output.new_token_ids)
        if self._detokenizer.stopped:  # what came in the same step behind the stop string would not have come alone
            count = self._detokenizer.num_tokens - before
        self._count(count)
        if reason is not None:
            text += self._detokenizer.flush()
            self.finish_reason = reason.value
        if self._detokenizer.stopped:
            self.abort()
            self.finish_reason = FinishReason.STOP.value
        return Delta(
            self._index,
            text,
            output.logprobs[:count],
            self.finish_reason or None,
            embedding=output.embedding,
            events=self._events(text, count),
            token_ids=output.new_token_ids[:count],
            stop_reason=self._stop_reason(output),
            prompt_logprobs=output.prompt_logprobs,
        )

    def _stop_reason(self, output: StepOutput) -> int | str | None:
        """None for an answer that the model ended."""
        if self._detokenizer.stopped or output.finish_reason is not FinishReason.STOP or not output.new_token_ids:
            return self._detokenizer.stop_string
        last = output.new_token_ids[-1]
        return None if last in self._serving.model.eos_token_ids else last

    def _events(self, text: str, num_tokens: int) -> tuple[Event, ...]:
        if self._parser is None:
            return (Text(text),) if text else ()
        was_reasoning = self._parser.is_reasoning
        events = self._parser.push(text)
        if was_reasoning or self._parser.is_reasoning:
            self.num_reasoning_tokens += num_tokens
        if self.finish_reason:
            events += self._parser.finish()
        return tuple(events)


async def _merged(sources: Sequence[AsyncGenerator[Delta]]) -> AsyncGenerator[Delta]:
    """Items of all sources as they come; the first failure ends it. No more can wait than max_tokens of each."""
    arrived: asyncio.Queue[Delta | asyncio.Task[None]] = asyncio.Queue()

    async def pump(source: AsyncGenerator[Delta]) -> None:
        async with aclosing(source):
            async for delta in source:
                arrived.put_nowait(delta)

    pumps = [asyncio.create_task(pump(source)) for source in sources]
    for task in pumps:
        task.add_done_callback(arrived.put_nowait)
    try:
        remaining = len(pumps)
        while remaining:
            item = await arrived.get()
            if isinstance(item, Delta):
                yield item
            else:
                item.result()
                remaining -= 1
    finally:
        for task in pumps:
            task.cancel()
        await asyncio.wait(pumps)


def _earliest_ns(seconds: Sequence[float]) -> int:
    reached = [moment for moment in seconds if moment]
    return int(min(reached) * NANOSECONDS) if reached else 0
