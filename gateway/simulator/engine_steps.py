"""The values of a simulated engine: the times of its steps, its requests, what it sends, and phases of equal steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from gateway.simulator.engine_cache import BlockTable

STEP_TOKENS_MAX = 2048  # by default, as in vLLM


@dataclass(frozen=True, slots=True)
class EngineSpeed:
    """How long steps take, in seconds: the constants of the formula above."""

    step: float  # whatever the step computes
    prefill_token: float
    decode: float  # per decoding request
    prefill_context: float = 0.0  # per prompt token and token before it
    decode_context: float = 0.0  # per decoding request and token of its context
    start: float = 0.0  # per request that a step admits: to look up its prefix, and the like
    start_token: float = 0.0  # per token of such a request's prompt: to hash its blocks
    request: float = 0.0  # before a request reaches the scheduler: client, router, server and template
    request_token: float = 0.0  # also before that, per token of the prompt: the tokenizer, and to read the text
    chunk: float = 0.0  # per token of an answer, beside the steps: server, router and client
    load: float = 0.0  # to load blocks from another engine, before a request reaches the scheduler
    load_token: float = 0.0  # per token of these blocks
    wait: float = 0.0  # also before a request reaches the scheduler, without computing: such as for an acknowledgement
    step_tokens_max: int = STEP_TOKENS_MAX
    running_max: int = 256  # requests that run at the same time

    @classmethod
    def of_rate(cls, prefill_tokens_per_second: float, decode_seconds: float = 0.02) -> EngineSpeed:
        """An engine that prefills at this rate in full steps. `decode_seconds` is a step in which one request decodes.

        Most of such a step reads the weights, whatever it computes. The rest are round figures for a GPU: a hundredth
        of it for each further request, and a hundredth for each 10,000 tokens of context.
        """
        step = 0.99 * decode_seconds
        prefill_token = max(1 / prefill_tokens_per_second - step / STEP_TOKENS_MAX, 0.0)
        return cls(step, prefill_token, 0.01 * decode_seconds, decode_context=1e-6 * decode_seconds)


class EngineJob:
    """One request at an engine. `cached_tokens` is known when it is first admitted."""

    __slots__ = (
        "answer_chain",
        "arrival",
        "cached_tokens",
        "chain",
        "computed",
        "first_chunk_at",
        "known",
        "left",
        "preemptions",
        "prompt_tokens",
        "session",
        "submitted_at",
        "table",
        "uncached_tokens",
    )

    def __init__(
        self,
        chain: Sequence[int],
        prompt_tokens: int,
        output_tokens: int = 1,
        answer_chain: Sequence[int] = (),
        session: str = "",
    ) -> None:
        """`chain`: the prompt's full blocks. `answer_chain`: the blocks behind them that the answer completes."""
        self.chain = chain
        self.answer_chain = answer_chain
        self.prompt_tokens = prompt_tokens
        self.session = session
        self.submitted_at = 0.0
        self.arrival = 0  # its number in order of arrival
        self.cached_tokens = -1
        self.first_chunk_at = -1.0
        self.preemptions = 0
        self.known = prompt_tokens  # tokens of the prompt and of the answer so far
        self.left = max(1, output_tokens)  # tokens of the answer that are still to be computed
        self.computed = 0  # of the known tokens
        self.table: BlockTable | None = None
        self.uncached_tokens = 0  # while it waits: by what was cached when it began to


class EngineEvent(NamedTuple):
    """What the engine sends for a job: its first chunk, or the end of its answer."""

    job: EngineJob
    is_first: bool
    is_end: bool


class Phase(NamedTuple):
    """Equal steps. Step i of them, from 0, takes `seconds + i * growth` seconds."""

    began: float
    steps: int
    seconds: float
    growth: float
    parts: tuple[tuple[EngineJob, int], ...]  # prompts, and how many tokens of each a step computes

    def seconds_of(self, steps: int) -> float:
        return steps * self.seconds + self.growth * steps * (steps - 1) / 2

    @property
    def ends(self) -> float:
        return self.began + self.seconds_of(self.steps)

    def cut(self, at: float) -> Phase:
        """The phase up to the end of the step that runs at this time."""
        passed, seconds, half = at - self.began, self.seconds, self.growth / 2
        if half:
            linear = seconds - half
            steps = (math.sqrt(linear * linear + 4 * half * passed) - linear) / (2 * half)
        else:
            steps = passed / seconds
        return self._replace(steps=min(self.steps, max(1, math.ceil(steps - 1e-9))))
