"""What the engine is asked for and what it answers: plain values, no tensors.

A `Request` is the one mutable thing in the engine and belongs to the scheduler. There is no prefill or decode
phase in it: `num_computed_tokens` chases `len(token_ids)`, and chunked prefill, prefix reuse, decode and recompute
after preemption are all the same chase.
"""

from __future__ import annotations

import enum
import math
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from backend.engine.errors import RequestRefused
from backend.engine.token_counts import OccurrenceCounts

MAX_LOGPROBS = 20  # alternatives that may be asked for per token: OpenAI's bound


class FinishReason(enum.Enum):
    """Why a request ended. The values are the OpenAI wire's, where it has one."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    DEADLINE = "deadline"
    DISPLACED = "displaced"  # from a full queue, by more urgent work
    ERROR = "error"


class RequestStatus(enum.Enum):
    """Where a request stands: it is in exactly one of the scheduler's queues, or finished."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen. `temperature == 0` is greedy.

    Presence and frequency penalties count the output alone, the repetition penalty prompt and output. With
    `max_tokens == 0` nothing is generated, and what is asked of the prompt is the whole answer.
    Raises `RequestRefused`, naming the field, for a value out of range.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: off
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()  # tokens that must not follow one another in the output
    min_tokens: int = 0
    stop_token_ids: frozenset[int] = frozenset()  # the model's end-of-sequence ids included, unless ignore_eos
    logprobs: int | None = None  # how many alternatives to report per token; None: none at all
    prompt_logprobs: int | None = None  # the same for the prompt's tokens, the first excepted

    def __post_init__(self) -> None:
        # A NaN fails every comparison, so each range is stated as what must hold.
        for name, holds, wanted in (
            ("max_tokens", self.max_tokens >= 0, "at least 0"),
            ("temperature", 0.0 <= self.temperature < math.inf, "a number of at least 0"),
            ("top_p", 0.0 < self.top_p <= 1.0, "above 0 and at most 1"),
            ("top_k", self.top_k >= 0, "at least 0 (0 switches it off)"),
            ("min_p", 0.0 <= self.min_p <= 1.0, "between 0 and 1"),
            ("presence_penalty", math.isfinite(self.presence_penalty), "a finite number"),
            ("frequency_penalty", math.isfinite(self.frequency_penalty), "a finite number"),
            ("repetition_penalty", 0.0 < self.repetition_penalty < math.inf, "a number above 0"),
            ("logit_bias", all(map(math.isfinite, self.logit_bias.values())), "finite numbers"),
            ("bad_words", all(self.bad_words), "of at least one token each"),
            ("min_tokens", 0 <= self.min_tokens <= self.max_tokens, "between 0 and max_tokens"),
            ("logprobs", (self.logprobs or 0) in range(MAX_LOGPROBS + 1), f"0 to {MAX_LOGPROBS}"),
            ("prompt_logprobs", (self.prompt_logprobs or 0) in range(MAX_LOGPROBS + 1), f"0 to {MAX_LOGPROBS}"),
        ):
            if not holds:
                raise RequestRefused(f"{name} must be {wanted}, not {getattr(self, name)!r}", param=name)

    @property
    def has_penalties(self) -> bool:
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1.0)


class Grammar(Protocol):
    """What one sequence's output must follow, and how far it has come. Belongs to the engine once submitted.

    An output that has come to its end can only be followed by a token that ends the sequence.
    """

    def fill_mask(self, address: int, num_bytes: int) -> str:
        """Writes which tokens may follow, token i as bit `i % 32` of the i // 32'th int32. Fails with a message."""
        ...

    def accept(self, token_id: int) -> None:
        """Goes on behind a token that the mask allowed."""
        ...


class Constraint(Protocol):
    """What the answers to a request must follow, each with a walk of its own."""

    def start(self) -> Grammar: ...


@dataclass(slots=True)
class Timing:
    """Seconds since the epoch at which a request passed each stage; 0.0 where it has not (yet)."""

    arrived: float = 0.0
    scheduled: float = 0.0
    first_token: float = 0.0
    finished: float = 0.0


@dataclass(slots=True)
class PromptTally:
    """Shared by the choices that are made of one prompt, which counts once."""

    is_counted: bool = False


@dataclass(slots=True, eq=False, weakref_slot=True)
class Request:
    """One sequence on its way through the engine.

    `pooling=True` asks for the mean of the final hidden states over the prompt instead of tokens; such a request
    never reads the prefix cache, since the hidden states of cached tokens are gone. Nor does one that asks for the
    log-probabilities of its prompt, until it has them.
    """

    request_id: str
    prompt_token_ids: list[int]
    sampling: SamplingParams
    cache_salt: str = ""
    priority: int = 0  # lower runs earlier, as in vLLM; above 0 is background work
    pooling: bool = False
    deadline: float = math.inf  # in seconds since the epoch; what has not ended by then is ended
    grammar: Grammar | None = None
    arrived: float = field(default_factory=time.time)
    session_id: str = ""  # told with the KV events of the blocks that it computes
    prompt_tally: PromptTally = field(default_factory=PromptTally)

    status: RequestStatus = RequestStatus.WAITING
    token_ids: list[int] = field(init=False)  # prompt and output so far
    seed: int = field(init=False)  # the sampling's, or a random one
    num_computed_tokens: int = 0  # tokens whose keys and values are in the cache
    num_cached_tokens: int = 0  # of the prompt, how many came from the prefix cache when first scheduled
    num_preemptions: int = 0
    block_table: list[int] = field(default_factory=list)
    block_hashes: list[bytes] = field(default_factory=list)  # one per full block of token_ids, chained
    hidden_sum: list[float] = field(default_factory=list)  # pooling: final hidden states, summed so far
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)  # so far, from the second token on
    penalised: OccurrenceCounts = field(
        default_factory=OccurrenceCounts
    )  # in the output, of the tokens under a penalty
    finish_reason: FinishReason | None = None
    timing: Timing = field(default_factory=Timing)

    def __post_init__(self) -> None:
        self.token_ids = list(self.prompt_token_ids)
        self.seed = secrets.randbits(63) if self.sampling.seed is None else self.sampling.seed
        self.timing.arrived = self.arrived
        if self.sampling.repetition_penalty != 1.0:
            self.penalised = OccurrenceCounts(self.prompt_token_ids)

    def append(self, token_id: int) -> None:
        """A token of the output."""
        self.token_ids.append(token_id)
        if self.sampling.has_penalties:
            self.penalised.add(token_id)
        if self.grammar:
            self.grammar.accept(token_id)

    @property
    def is_background(self) -> bool:
        return self.priority > 0

    @property
    def needs_all_hidden(self) -> bool:
        """Whether something is made of every token's hidden state, so that none may come from the cache."""
        return self.pooling or (self.sampling.prompt_logprobs is not None and not self.num_output_tokens)

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - len(self.prompt_token_ids)

    @property
    def num_uncomputed_tokens(self) -> int:
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def max_total_tokens(self) -> int:
        """Prompt and output at its longest."""
        return self.num_prompt_tokens + (0 if self.pooling else self.sampling.max_tokens)


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """The log-probability (natural log) of a sampled token and of the most likely alternatives.

    Both are the model's own, before penalties, bias and temperature.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    rank: int = 1  # of the token among the whole vocabulary; 1 is the most likely


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What one engine step means for one request. The last one carries `finish_reason`.

    With `FinishReason.STOP` the last of `new_token_ids` is the stop token itself: counted, not shown.
    """

    request_id: str
    new_token_ids: tuple[int, ...] = ()
    finish_reason: FinishReason | None = None
    logprobs: tuple[TokenLogprob, ...] = ()
    embedding: tuple[float, ...] | None = None
    prompt_logprobs: tuple[TokenLogprob, ...] | None = None  # on the first output, if asked for
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    timing: Timing | None = None  # on the last output only
    error: str | None = None
