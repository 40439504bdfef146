"""A request: the tokens of one sequence, and how many of them have been computed. No tensors.

A `Request` is the only mutable object in the engine and belongs to the scheduler. It has no prefill or decode phase:
each step raises `num_computed_tokens` towards `len(token_ids)`. Chunked prefill, prefix cache hits, decode and
recomputation after a preemption are all cases of this one rule.

Minimal path 2 of 9. Next: plan.py.
"""

from __future__ import annotations

import enum
import math
import secrets
import time
from dataclasses import dataclass, field

from backend.engine.adapter import Adapter
from backend.engine.constraint import Grammar
from backend.engine.occurrence_counts import OccurrenceCounts
from backend.engine.outputs import FinishReason, Timing, TokenLogprob
from backend.engine.pooling import Pooling
from backend.engine.prompt_images import PromptImages
from backend.engine.sampling_params import SamplingParams


class RequestStatus(enum.Enum):
    """Where a request is: in exactly one of the scheduler's two queues, or finished."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True)
class PromptTally:
    """Shared by all choices (`n`) of one prompt, so that metrics count the prompt once."""

    is_counted: bool = False


@dataclass(slots=True, eq=False, weakref_slot=True)
class Request:
    """One sequence on its way through the engine.

    With `pooling`, a request returns one vector of the prompt instead of tokens. Unless the vector is that of the last
    token, such a request never reads the prefix cache, since the hidden states of cached tokens are gone. A request for
    the log-probabilities of its prompt does not read it either, until it has them.
    """

    request_id: str
    prompt_token_ids: list[int]
    sampling: SamplingParams
    cache_salt: str = ""
    adapter: Adapter | None = None
    images: PromptImages | None = None  # None: the prompt is text
    priority: int = 0  # lower is scheduled earlier, as in vLLM; above 0 is background work
    pooling: Pooling | None = None
    deadline: float = math.inf  # in seconds since the epoch; a request still unfinished then is ended
    grammar: Grammar | None = None
    mask_is_late: bool = False  # the last step sampled no token, because the grammar's mask was not ready
    arrived: float = field(default_factory=time.time)
    session_id: str = ""  # published with the KV events of the blocks that this request computes
    prompt_tally: PromptTally = field(default_factory=PromptTally)

    status: RequestStatus = RequestStatus.WAITING
    token_ids: list[int] = field(init=False)  # prompt, then output so far
    seed: int = field(init=False)  # from the sampling parameters, or random
    is_plain: bool = field(init=False)  # every token is a plain sample (without a grammar), and nothing else is wanted
    is_plain_or_penalised: bool = field(init=False)  # the same, apart from penalties
    num_computed_tokens: int = 0  # tokens whose keys and values are in the KV cache
    num_cached_tokens: int = 0  # prompt tokens that came from the prefix cache when first scheduled
    num_transferred_tokens: int = 0  # prompt tokens whose blocks came from another engine for this request
    num_preemptions: int = 0
    block_table: list[int] = field(default_factory=list)
    block_hashes: list[bytes] = field(default_factory=list)  # one per full block of token_ids, chained
    pooled: list[float] = field(default_factory=list)  # pooling: the vector; for the mean, the sum so far
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)  # so far, from the second token on
    # Occurrences in the output of each token that is under a penalty.
    penalty_counts: OccurrenceCounts = field(default_factory=OccurrenceCounts)
    finish_reason: FinishReason | None = None
    timing: Timing = field(default_factory=Timing)

    def __post_init__(self) -> None:
        self.token_ids = list(self.prompt_token_ids)
        self.seed = secrets.randbits(63) if self.sampling.seed is None else self.sampling.seed
        samples = self.sampling.max_tokens > 0 and not self.needs_prompt
        self.is_plain_or_penalised = samples and self.sampling.is_plain_or_penalised(0)
        self.is_plain = self.is_plain_or_penalised and not self.sampling.has_penalties
        self.timing.arrived = self.arrived
        if self.sampling.repetition_penalty != 1.0:
            self.penalty_counts = OccurrenceCounts(self.prompt_token_ids)

    def append(self, token_id: int) -> None:
        """Adds a token to the output, and to the penalty counts and the grammar that depend on it."""
        self.token_ids.append(token_id)
        if self.sampling.has_penalties:
            self.penalty_counts.add(token_id)
        if self.grammar:
            self.grammar.accept(token_id)

    @property
    def awaits_mask(self) -> bool:
        """Whether no step can sample the next token yet. Does not wait."""
        if self.mask_is_late and self.grammar and self.grammar.is_ready():
            self.mask_is_late = False
        return self.mask_is_late

    def num_computable(self, num_tokens: int) -> int:
        """How many of the next tokens can be computed: those before the first image that is not encoded yet."""
        images, start = self.images, self.num_computed_tokens
        return images.num_computable(start, num_tokens, self.priority) if images else num_tokens

    @property
    def is_background(self) -> bool:
        return self.priority > 0

    @property
    def needs_prompt(self) -> bool:
        """Whether the next output is more than a sampled token: the vector or the log-probabilities of the prompt."""
        return self.pooling is not None or self.needs_all_hidden

    @property
    def needs_all_hidden(self) -> bool:
        """Whether the answer uses every token's hidden state, so that no token may come from the prefix cache."""
        needs_logprobs = self.sampling.prompt_logprobs is not None and not self.num_output_tokens
        return needs_logprobs or self.pooling in (Pooling.MEAN, Pooling.CLS)

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
        """Prompt plus the longest possible output."""
        return self.num_prompt_tokens + (0 if self.pooling else self.sampling.max_tokens)

    @property
    def can_sample_ahead(self) -> bool:
        """Whether a token can be sampled while the host does not know the one before it.

        Masks of grammars and bad words depend on that token. Penalties do, too, but a device can count it by itself.
        """
        return not self.grammar and not self.sampling.bad_words

    def has_plain_sampling(self, ahead: int = 0) -> bool:
        """Whether the token `ahead` positions after the next depends on logits, temperature and filters alone."""
        return not self.grammar and (self.is_plain or self.sampling.is_plain(self.num_output_tokens + ahead))
