"""Runs one sequence of a request in the engine, and converts step outputs to text and parser events.

`GenerationTask` describes what a complete request needs from the engine. `LiveSequence` is one prompt and one of its
choices. `ChoiceDelta` is what one engine step adds to a choice. The engine stops a sequence at eos, stop token ids and
max_tokens. `LiveSequence` finds stop strings in the decoded text and then passes the engine the number of tokens to
keep.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from backend.engine.async_engine import OutputStream
from backend.engine.constraint import Constraint
from backend.engine.detokenizer import Detokenizer
from backend.engine.outputs import FinishReason, StepOutput, TokenLogprob
from backend.engine.pooling import Pooling
from backend.engine.prompt_images import PromptImages
from backend.engine.request import Request
from backend.engine.sampling_params import SamplingParams
from backend.kv_transfer.peers import BlockSource
from backend.layers.lora import LoraAdapter
from backend.parsers.base import ContentText, OutputEvent
from backend.parsers.chained import ChainedParser
from backend.server.asgi import HttpExchange
from backend.server.components import ServerComponents
from backend.server.errors import DeadlineExceeded, EngineFailure, InvalidRequest
from backend.server.tracing import NANOSECONDS
from backend.server.usage_records import NO_USAGE, TokenUsage


@dataclass(frozen=True, slots=True)
class GenerationTask:
    """Prompts and parameters of a request for the engine. Each prompt runs once per item of `samplings`."""

    operation: str  # OpenTelemetry's gen_ai.operation.name: chat, text_completion, embeddings; also rerank, score
    prompts: list[list[int]]
    samplings: list[SamplingParams]
    stop: list[str] = field(default_factory=list)
    grammar: Constraint | None = None
    make_parser: Callable[[], ChainedParser] | None = None  # called once per choice; None: the output is plain text
    skip_special_tokens: bool = True
    include_stop_string: bool = False
    continues_prompt: bool = False  # whether the output text continues the prompt's text
    cache_salt: str = ""
    images: PromptImages | None = None  # of the only prompt
    adapter: LoraAdapter | None = None
    priority: int = 0
    pooling: Pooling | None = None
    block_source: BlockSource | None = None  # another engine, from which the prompts' blocks are loaded first
    earlier_usage: TokenUsage = NO_USAGE  # of the request's earlier tasks, for its usage record


@dataclass(slots=True)  # not frozen: one is made for each token, and a frozen one takes three times as long to make
class ChoiceDelta:
    """Text, tokens and events that one engine step added to one choice. The last delta has a `finish_reason`."""

    index: int
    text: str
    logprobs: tuple[TokenLogprob, ...]
    finish_reason: str | None
    events: tuple[
        OutputEvent, ...
    ] = ()  # the text as content, reasoning and tool calls; only content if there is no parser
    token_ids: tuple[int, ...] = ()  # tokens of this step, including the stop token, which has no text
    stop_reason: int | str | None = None  # the stop string or token id of the request that ended the choice
    prompt_logprobs: tuple[TokenLogprob, ...] | None = None  # in the first delta of a choice, if requested
    pooled: tuple[float, ...] | None = None


class LiveSequence:
    """One prompt in the engine and the choice that is generated from it. Use it on the event loop only."""

    def __init__(
        self,
        components: ServerComponents,
        exchange: HttpExchange,
        task: GenerationTask,
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
            adapter=task.adapter,
            images=task.images,
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
        self.finish_reason = ""  # empty until the sequence has ended
        self._components = components
        self._received_ns = exchange.received_ns
        self._index = index
        self._grammar_field = task.grammar.field if task.grammar else ""
        self._shows_stop = task.include_stop_string
        self._detokenizer = Detokenizer(
            components.model.codec.tokenizer,
            task.stop,
            skip_special_tokens=task.skip_special_tokens,
            include_stop_string=task.include_stop_string,
            min_tokens=sampling.min_tokens,
            prompt_token_ids=prompt if task.continues_prompt else (),
        )
        self._parser = task.make_parser() if task.make_parser else None
        self._outputs: OutputStream | None = None

    def submit(self) -> None:
        """Submits the sequence to the engine. Raises ApiError if the engine rejects it."""
        self._outputs = self._components.submit(self.request)

    def listen(self, listener: Callable[[StepOutput], None]) -> None:
        """Calls `listener` with each output of the engine, which `delta` converts. Call this method once."""
        assert self._outputs is not None, "not submitted"
        self._outputs.listen(listener)

    def close(self, *, failed: bool) -> None:
        """Aborts the sequence if it has not ended, and counts its finish reason. Call this method once."""
        if not self.finish_reason:
            self.finish_reason = FinishReason.ERROR.value if failed else FinishReason.ABORT.value
            self.abort()
        self._components.metrics.count_finished(self.finish_reason)

    @property
    def final_num_tokens(self) -> int:
        """The number of output tokens, including tokens of steps that ran after the client had disconnected."""
        return self.request.num_output_tokens if self.is_cut_short else self.num_tokens

    @property
    def is_cut_short(self) -> bool:
        """Whether a disconnect, deadline, displacement or error ended the sequence before its output was complete."""
        return self.finish_reason not in (FinishReason.STOP.value, FinishReason.LENGTH.value)

    def abort(self) -> None:
        """Aborts the sequence in the engine. Does nothing if it has ended or was never submitted."""
        self._components.engine.abort(self.request.request_id)

    def _count(self, count: int) -> None:
        if not count:
            return
        now_ns = time.time_ns()
        if not self.num_tokens:
            self._components.metrics.observe_first_token((now_ns - self._received_ns) / NANOSECONDS)
        else:
            self._components.metrics.observe_tokens((now_ns - self.last_token_ns) / NANOSECONDS, count)
        self.num_tokens += count
        self.last_token_ns = now_ns

    def delta(self, output: StepOutput) -> ChoiceDelta:
        """Converts an output to text and events. The last one sets `finish_reason`.

        Raises EngineFailure, InvalidRequest, DeadlineExceeded or Overloaded if the engine has ended the sequence early.
        """
        self.num_cached_tokens = output.num_cached_tokens
        self.num_preemptions = output.num_preemptions
        reason = output.finish_reason
        if reason is FinishReason.DEADLINE:
            self.finish_reason = reason.value
            raise DeadlineExceeded("The request's deadline passed before its output was complete.")
        if reason is FinishReason.DISPLACED:
            self.finish_reason = reason.value
            raise self._components.overloaded("The queue is full, and a request of higher priority displaced this one.")
        grammar = self.request.grammar
        if reason is FinishReason.ERROR and grammar and grammar.error:
            field = self._grammar_field
            raise InvalidRequest(f"`{field}` cannot be followed any further: {grammar.error}.", param=field)
        if reason in (FinishReason.ERROR, FinishReason.ABORT):
            raise EngineFailure(output.error or "The engine aborted this request.")
        # The stop token is reported and counted, but its text is shown only if the request asks for it.
        shown = len(output.new_token_ids) - (reason is FinishReason.STOP and not self._shows_stop)
        before = self._detokenizer.num_tokens
        text = self._detokenizer.push(output.new_token_ids[:shown])
        count = len(output.new_token_ids)
        if self._detokenizer.stopped:  # speculation can add tokens after the stop string; do not count them
            count = self._detokenizer.num_tokens - before
        self._count(count)
        if reason is not None:
            text += self._detokenizer.flush()
            self.finish_reason = reason.value
        if self._detokenizer.stopped:
            self._components.engine.stop_early(self.request, self.num_tokens)
            self.finish_reason = FinishReason.STOP.value
        return ChoiceDelta(
            self._index,
            text,
            output.logprobs[:count],
            self.finish_reason or None,
            pooled=output.pooled,
            events=self._events(text, count),
            token_ids=output.new_token_ids[:count],
            stop_reason=self._stop_reason(output),
            prompt_logprobs=output.prompt_logprobs,
        )

    def _stop_reason(self, output: StepOutput) -> int | str | None:
        """Returns vLLM's `stop_reason`. None if the model ended the output with an eos token."""
        if self._detokenizer.stopped or output.finish_reason is not FinishReason.STOP or not output.new_token_ids:
            return self._detokenizer.stop_string
        last = output.new_token_ids[-1]
        return None if last in self._components.model.eos_token_ids else last

    def _events(self, text: str, num_tokens: int) -> tuple[OutputEvent, ...]:
        if self._parser is None:
            return (ContentText(text),) if text else ()
        was_reasoning = self._parser.is_reasoning
        events = self._parser.push(text)
        if was_reasoning or self._parser.is_reasoning:
            self.num_reasoning_tokens += num_tokens
        if self.finish_reason:
            events += self._parser.finish()
        return tuple(events)
