"""What a request asks of the engine, and one of the choices that grow from it: tokens in, text and events out.

The engine stops at eos, stop token ids and max_tokens; stop sequences are found here, in the text, and the engine is
told where in the sequence.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from dataclasses import dataclass, field

from backend.engine.detokenizer import Detokenizer
from backend.engine.errors import EngineError
from backend.engine.request import Constraint, FinishReason, Request, SamplingParams, StepOutput, TokenLogprob
from backend.parsers.base import ContentText, OutputEvent
from backend.parsers.chained import ChainedParser
from backend.server.asgi import HttpExchange
from backend.server.components import ServerComponents
from backend.server.errors import DeadlineExceeded, EngineFailure
from backend.server.tracing import NANOSECONDS


@dataclass(frozen=True, slots=True)
class GenerationTask:
    """What is asked of the engine: every prompt once per member of `samplings`, one for each choice."""

    operation: str  # of the GenAI conventions: chat, text_completion, embeddings
    prompts: list[list[int]]
    samplings: list[SamplingParams]
    stop: list[str] = field(default_factory=list)
    grammar: Constraint | None = None
    make_parser: Callable[[], ChainedParser] | None = None  # for each choice one; None: an answer is text
    skip_special_tokens: bool = True
    include_stop_string: bool = False
    continues_prompt: bool = False  # whether the text of an answer goes on with that of its prompt
    cache_salt: str = ""
    priority: int = 0
    pooling: bool = False


@dataclass(frozen=True, slots=True)
class ChoiceDelta:
    """What one step added to one choice. The last one of a choice carries `finish_reason`."""

    index: int
    text: str
    logprobs: tuple[TokenLogprob, ...]
    finish_reason: str | None
    events: tuple[OutputEvent, ...] = ()  # what the text is made of: without a parser, text
    token_ids: tuple[int, ...] = ()  # those of the step, with the one that ended the answer, which has no text
    stop_reason: int | str | None = None  # the stop string or token id of the request's own that ended the answer
    prompt_logprobs: tuple[TokenLogprob, ...] | None = None  # with a choice's first, where asked for
    embedding: tuple[float, ...] | None = None


class LiveSequence:
    """One prompt and the choice that grows from it."""

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
        self._components = components
        self._received_ns = exchange.received_ns
        self._index = index
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
        self._outputs: AsyncIterator[StepOutput] | None = None

    def submit(self) -> None:
        self._outputs = self._components.submit(self.request)

    async def deltas(self) -> AsyncGenerator[ChoiceDelta]:
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
        self._components.metrics.finished(self.finish_reason)

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
        self._components.engine.abort(self.request.request_id)

    def _note(self, output: StepOutput) -> None:
        self.num_cached_tokens = output.num_cached_tokens
        self.num_preemptions = output.num_preemptions

    def _count(self, count: int) -> None:
        if not count:
            return
        now_ns = time.time_ns()
        if not self.num_tokens:
            self._components.metrics.first_token((now_ns - self._received_ns) / NANOSECONDS)
        else:
            self._components.metrics.tokens((now_ns - self.last_token_ns) / NANOSECONDS, count)
        self.num_tokens += count
        self.last_token_ns = now_ns

    def _delta(self, output: StepOutput) -> ChoiceDelta:
        reason = output.finish_reason
        if reason is FinishReason.DEADLINE:
            self.finish_reason = reason.value
            raise DeadlineExceeded("The request's deadline came before the end of its answer.")
        if reason is FinishReason.DISPLACED:
            self.finish_reason = reason.value
            raise self._components.overloaded("The queue is full, and more urgent work has taken this request's place.")
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
            self._components.engine.stop_early(self.request, self.num_tokens)
            self.finish_reason = FinishReason.STOP.value
        return ChoiceDelta(
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
