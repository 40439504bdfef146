"""How the tokens of a request are sampled, checked when the request is made."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from backend.engine.errors import RequestRefused

MAX_LOGPROBS = 20  # alternatives per token that a request may ask for: OpenAI's limit


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling parameters, with the names and defaults of vLLM. `temperature == 0` is greedy.

    Presence and frequency penalties count the output only; the repetition penalty counts prompt and output. With
    `max_tokens == 0` no token is generated, and the answer consists of what was requested about the prompt.
    Raises `RequestRefused`, naming the field, if a value is out of range.
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
    bad_words: tuple[tuple[int, ...], ...] = ()  # token sequences that must not occur in the output
    min_tokens: int = 0
    stop_token_ids: frozenset[int] = frozenset()  # includes the model's end-of-sequence ids, unless ignore_eos
    logprobs: int | None = None  # number of alternatives to report per token; None: report no log-probabilities
    prompt_logprobs: int | None = None  # the same for the prompt's tokens, except the first

    def __post_init__(self) -> None:
        # Each range is stated as a condition that must hold, because a NaN fails every comparison.
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

    @property
    def has_filters(self) -> bool:
        """Whether top-k, top-p or min-p limit the tokens that may be sampled at random."""
        return bool(self.top_k or self.top_p < 1.0 or self.min_p > 0.0)

    def is_plain(self, num_output_tokens: int) -> bool:
        """Whether the token after so many output tokens is the argmax, or drawn by temperature and filters alone.

        The sampler then needs no other token of the sequence. Grammars are not known here.
        """
        return self.is_plain_or_penalised(num_output_tokens) and not self.has_penalties

    def is_plain_or_penalised(self, num_output_tokens: int) -> bool:
        """As `is_plain`, but the token may also depend on penalties."""
        forbids = self.logit_bias or self.bad_words or num_output_tokens < self.min_tokens
        return not forbids and self.logprobs is None
