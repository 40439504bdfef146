"""Runs one HTTP request through the engine, with one sequence per prompt and choice.

    async with Generation(components, exchange, task) as generation:    submits all sequences, or none
        await generation.run(take)                                      calls take(delta) as output arrives

Every exit from the block aborts the sequences that have not finished, counts how each sequence ended, stores the
request's usage record and exports its spans. `sequence.py` implements one sequence, which converts the engine's tokens
to text and parser events.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Self

from backend.engine.outputs import StepOutput
from backend.engine.request import RequestStatus
from backend.kv_transfer.peers import BlockSource
from backend.kv_transfer.prefix_loader import PrefixLoader, Transfer
from backend.server import semconv
from backend.server.asgi import HttpExchange
from backend.server.components import ServerComponents
from backend.server.errors import ApiError, InvalidRequest
from backend.server.kv_transfer import KvTransfer
from backend.server.metrics import CompletedRequest
from backend.server.responses import Json, usage_object
from backend.server.sequence import ChoiceDelta, GenerationTask, LiveSequence
from backend.server.tracing import NANOSECONDS, Attributes, EnginePhaseTimings, RequestTrace, phases
from backend.server.usage_records import TokenUsage


class Generation:
    """All sequences of one request, as an async context manager.

    The constructor raises InvalidRequest if the request needs more sequences than the engine can hold.
    Entering the block raises ApiError if the engine rejects a sequence, and aborts the sequences already submitted.
    """

    def __init__(self, components: ServerComponents, exchange: HttpExchange, task: GenerationTask) -> None:
        self._components = components
        self._exchange = exchange
        self._task = task
        self._loading_ns = 0  # when blocks of another engine began to be loaded
        self._transfers: list[Transfer] = []
        self._submitted_ns = 0
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()  # all choices, or one failed
        # A client may reuse its x-request-id for a retry, but ids in the engine must be unique.
        self.id = f"{exchange.request_id}-{secrets.token_hex(4)}"
        choices = [(prompt, sampling) for prompt in task.prompts for sampling in task.samplings]
        if len(choices) > components.max_sequences:
            raise InvalidRequest(
                f"This server accepts at most {components.max_sequences} choices, but {len(choices)} were requested.",
                param="n" if len(task.samplings) > 1 else "prompt",
            )
        self.sequences = [
            LiveSequence(components, exchange, task, i, f"{self.id}-{i}", prompt, sampling)
            for i, (prompt, sampling) in enumerate(choices)
        ]
        self.model_name = components.name_of(task.adapter)
        self._task = replace(task, adapter=None)  # the usage record may outlive the request, and must not keep it
        # All choices of a prompt share one tally, so that the engine's counters count the prompt once.
        for i, sequence in enumerate(self.sequences):
            sequence.request.prompt_tally = self.sequences[i - i % len(task.samplings)].request.prompt_tally

    async def __aenter__(self) -> Self:
        transfer = self._components.kv_transfer
        if self._task.block_source and transfer and transfer.loader:
            await self._load_blocks(self._task.block_source, transfer, transfer.loader)
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
        if not self._ended.cancel() and not self._ended.cancelled():
            self._ended.exception()  # raised by `run`, or lost because the handler was cancelled at the same time
        cut_short = any(sequence.is_cut_short for sequence in self.sequences)
        for sequence in self.sequences:
            sequence.close(failed=isinstance(error, ApiError))
        timings = self._timings()
        # An aborted sequence runs until the engine processes the abort, so its usage is read from the engine later.
        record = self._final_usage if cut_short else self._task.earlier_usage + self.usage
        self._components.usage_records.add(self._exchange.request_id, record)
        # The histograms cover completed requests only.
        if error is None:
            self._measure(timings)
        self._components.tracer.record(self._record(timings, error))

    async def _load_blocks(self, source: BlockSource, transfer: KvTransfer, loader: PrefixLoader) -> None:
        """Loads the blocks of all prompts that are not cached. The choices of a prompt share its blocks."""
        self._loading_ns = time.time_ns()
        # Replaced when the block ends. If the client leaves before, nothing has been computed for it.
        self._components.usage_records.add(self._exchange.request_id, self._task.earlier_usage)
        num_choices = len(self._task.samplings)
        firsts = [sequence.request for sequence in self.sequences[::num_choices]]
        seconds = firsts[0].deadline - time.time()
        kept_tokens = source.kept_tokens if len(firsts) == 1 else None  # it is that of one prompt
        self._transfers = await asyncio.gather(
            *(loader.load(request, source.peer, seconds, kept_tokens) for request in firsts)
        )
        for i, sequence in enumerate(self.sequences):
            sequence.request.num_transferred_tokens = firsts[i // num_choices].num_transferred_tokens
        waited = (time.time_ns() - self._loading_ns) / NANOSECONDS
        for each in self._transfers:
            transfer.metrics.observe_load(each, waited)

    async def run(self, take: Callable[[ChoiceDelta], None]) -> None:
        """Calls `take` with each delta of all sequences, as soon as the engine delivers it. Call this method once.

        No task is woken for a delta: at 64 streams, that would cost several times as much as the delta itself.
        Raises EngineFailure if the engine fails a sequence, DeadlineExceeded if the deadline passes, and Overloaded if
        a request of higher priority displaces this one from the queue. An exception of `take` is raised here.
        """
        unfinished = len(self.sequences)

        def on_output(sequence: LiveSequence, output: StepOutput) -> None:
            nonlocal unfinished
            if self._ended.done() or sequence.finish_reason:
                return  # after a stop string, the engine generates tokens until it learns of it
            try:
                delta = sequence.delta(output)
                take(delta)
            except Exception as error:  # noqa: BLE001  raised by `run`
                self._ended.set_exception(error)
                return
            if delta.finish_reason:
                unfinished -= 1
                if not unfinished:
                    self._ended.set_result(None)

        for sequence in self.sequences:
            sequence.listen(partial(on_output, sequence))
        await self._ended

    @property
    def usage(self) -> TokenUsage:
        """The request's token usage up to now. A prompt and its cached tokens count once for all choices."""
        firsts = self.sequences[:: len(self._task.samplings)]
        return TokenUsage(
            prompt_tokens=sum(len(prompt) for prompt in self._task.prompts),
            completion_tokens=sum(sequence.num_tokens for sequence in self.sequences),
            cached_tokens=sum(sequence.num_cached_tokens for sequence in firsts),
            reasoning_tokens=sum(sequence.num_reasoning_tokens for sequence in self.sequences),
        )

    @property
    def usage_object(self) -> Json:
        """The usage as responses contain it."""
        return usage_object(self.usage, prompt_tokens_details=self._components.prompt_tokens_details)

    def _final_usage(self) -> TokenUsage | None:
        """Returns the usage as `vllm:prompt_tokens` and `vllm:generation_tokens` count it, with that of earlier tasks.

        Returns None until the engine has finished. A prompt whose prefill did not complete counts zero, even if the
        engine computed a part of it.
        """
        if any(sequence.request.status is not RequestStatus.FINISHED for sequence in self.sequences):
            return None
        choices = len(self._task.samplings)
        groups = [self.sequences[i : i + choices] for i in range(0, len(self.sequences), choices)]
        counted = [group[0].request for group in groups if any(each.request.timing.first_token for each in group)]
        return self._task.earlier_usage + TokenUsage(
            prompt_tokens=sum(request.num_prompt_tokens for request in counted),
            completion_tokens=sum(sequence.final_num_tokens for sequence in self.sequences),
            cached_tokens=sum(request.num_cached_tokens for request in counted),
        )

    def _measure(self, timings: EnginePhaseTimings) -> None:
        lengths = [sequence.num_tokens for sequence in self.sequences]
        self._components.metrics.observe_request(
            CompletedRequest(
                e2e_seconds=(timings.ended_ns - timings.received_ns) / NANOSECONDS,
                phase_seconds={name: (end - start) / NANOSECONDS for name, start, end in phases(timings)},
                usage=self.usage,
                num_choices=len(self._task.samplings),
                max_tokens=0 if self._task.pooling else self._task.samplings[0].max_tokens,
                longest_choice=max(lengths),
                later_tokens=sum(max(0, length - 1) for length in lengths),
                num_preemptions=sum(sequence.num_preemptions for sequence in self.sequences),
            )
        )

    def _record(self, timings: EnginePhaseTimings, error: BaseException | None) -> RequestTrace:
        return RequestTrace(
            timings=timings,
            headers=self._exchange.headers,
            attributes=self._attributes(error),
            loading=self._loading_attributes(),
            prefill=self._prefill_attributes(),
            decode={
                semconv.OUTPUT_TOKENS: self.usage.completion_tokens,
                semconv.PREEMPTIONS: sum(sequence.num_preemptions for sequence in self.sequences),
            },
            error=None if error is None else str(error) or type(error).__name__,
        )

    def _timings(self) -> EnginePhaseTimings:
        """Returns the phase timings of the complete request, from the first sequence's start to the last one's end."""
        timings = [sequence.request.timing for sequence in self.sequences]
        return EnginePhaseTimings(
            received_ns=self._exchange.received_ns,
            loading_ns=self._loading_ns,
            submitted_ns=self._submitted_ns,
            scheduled_ns=_earliest_ns([timing.scheduled for timing in timings]),
            # An embedding is complete after prefill: it has no output tokens and no decode phase.
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
            semconv.REQUEST_MODEL: self.model_name,
            semconv.RESPONSE_MODEL: self.model_name,
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

    def _loading_attributes(self) -> Attributes:
        if not self._transfers:
            return {}
        return {
            semconv.KV_LOAD_SOURCE: str(self._transfers[0].peer),
            semconv.KV_LOAD_OUTCOME: [transfer.outcome.value for transfer in self._transfers],
            semconv.KV_LOAD_BLOCKS: sum(transfer.num_blocks for transfer in self._transfers),
            semconv.KV_LOAD_BYTES: sum(transfer.num_bytes for transfer in self._transfers),
        }

    def _prefill_attributes(self) -> Attributes:
        cached = sum(sequence.num_cached_tokens for sequence in self.sequences)
        total = sum(len(sequence.request.prompt_token_ids) for sequence in self.sequences)
        return {semconv.CACHED_TOKENS: cached, semconv.COMPUTED_TOKENS: total - cached}


def _earliest_ns(seconds: Sequence[float]) -> int:
    """Returns the earliest time in nanoseconds. Ignores zeros, which mark a phase that was not reached."""
    reached = [moment for moment in seconds if moment]
    return int(min(reached) * NANOSECONDS) if reached else 0
