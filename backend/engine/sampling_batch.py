"""The sampling parameters of a step as tensors: one row for each token that is sampled.

A `NextToken` is one such row before it becomes a tensor. `make_sampling_batch` builds only the parts of a
`SamplingBatch` that any row needs, so a step without penalties, bias or filters pays nothing for them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from backend.attention.uploads import upload
from backend.engine.occurrence_counts import OccurrenceCounts
from backend.engine.request import Request
from backend.engine.sampling_params import SamplingParams
from backend.ops.sampling import LogitBias, LogitEntries, RandomRows, RowPenalties, SamplingFilters

NOTHING_COUNTED = OccurrenceCounts()
GREEDY_BELOW_TEMPERATURE = 1e-5  # dividing by less would overflow, and the result would be the same


@dataclass(slots=True)
class NextToken:
    """A token to sample: after a request's last token, or after some of its drafts, as if these were accepted."""

    request: Request
    drafts: tuple[int, ...] = ()

    @property
    def sampling(self) -> SamplingParams:
        return self.request.sampling

    @property
    def position(self) -> int:
        """The index of the token in its sequence."""
        return len(self.request.token_ids) + len(self.drafts)

    @property
    def num_output_tokens(self) -> int:
        """How many output tokens come before it, drafts included."""
        return self.request.num_output_tokens + len(self.drafts)

    @property
    def is_plain_greedy(self) -> bool:
        """Whether it is the argmax of unchanged logits."""
        return self.is_greedy and self.request.has_plain_sampling()

    @property
    def is_greedy(self) -> bool:
        """Whether it is the most likely token, and not drawn."""
        return self.request.sampling.temperature < GREEDY_BELOW_TEMPERATURE

    def biases(self) -> Mapping[int, float]:
        """What is added to the logits of single tokens."""
        sampling = self.sampling
        has_minimum = self.num_output_tokens < sampling.min_tokens
        if not sampling.bad_words and not has_minimum:
            return sampling.logit_bias
        biases = {**sampling.logit_bias, **dict.fromkeys(self.forbidden(), float("-inf"))}
        if has_minimum:
            biases.update(dict.fromkeys(sampling.stop_token_ids, float("-inf")))
        return biases

    def forbidden(self) -> list[int]:
        """The tokens that would complete one of the request's bad words."""
        words = self.sampling.bad_words
        longest = max(map(len, words), default=1)
        start = max(self.request.num_prompt_tokens, len(self.request.token_ids) - longest + 1)
        tail = (*self.request.token_ids[start:], *self.drafts)
        return [word[-1] for word in words if word[:-1] == tail[len(tail) - len(word) + 1 :]]

    @property
    def penalty_counts(self) -> OccurrenceCounts:
        """The request's penalty counts, with its drafts added."""
        if not self.drafts:
            return self.request.penalty_counts
        counts = self.request.penalty_counts.copy()
        for token_id in self.drafts:
            counts.add(token_id)
        return counts


@dataclass(frozen=True, slots=True)
class LogprobRows:
    """The L rows whose log-probabilities are reported."""

    rows: Tensor  # [L] int64
    counts: dict[int, int]  # number of alternatives, by row


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """How N rows of logits are sampled. A part that no row needs is None."""

    random: RandomRows | None
    penalties: RowPenalties | None
    bias: LogitBias | None
    logprobs: LogprobRows | None


def make_sampling_batch(tokens: Sequence[NextToken], vocab_size: int, device: torch.device) -> SamplingBatch:
    """One row for each token, in this order."""
    return SamplingBatch(
        random=random_rows(tokens, vocab_size, device),
        penalties=row_penalties(tokens),
        bias=_bias(tokens, device),
        logprobs=_logprob_rows(tokens, device),
    )


def uniform(seeds: Sequence[int], positions: Sequence[int]) -> NDArray[np.float64]:
    """Random numbers in [0, 1) as a pure function of seed and position.

    So a token does not depend on the rest of the batch, on preemption or on the device. SplitMix64's finaliser (Steele,
    Lea and Flood, 2014) is applied to the seed and then to the position, so that neighbouring seeds and neighbouring
    positions give unrelated numbers. 52 bits are used: multiplied by a sum of floats, the result stays below that sum.
    """
    return uniform_at(mix_seeds(seeds), positions)


def mix_seeds(seeds: Sequence[int]) -> NDArray[np.uint64]:
    """The part of `uniform` that depends on the seeds alone."""
    return _mix(np.array([seed & _MASK_64 for seed in seeds], dtype=np.uint64))


def uniform_at(mixed: NDArray[np.uint64], positions: Sequence[int] | NDArray[np.uint64]) -> NDArray[np.float64]:
    """The rest of `uniform`, from what `mix_seeds` returns."""
    bits = _mix(mixed + np.array(positions, dtype=np.uint64)) >> np.uint64(12)
    return bits.astype(np.float64) * 2.0**-52


_MASK_64 = (1 << 64) - 1
_GAMMA, _FIRST, _SECOND = (np.uint64(c) for c in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def _mix(value: NDArray[np.uint64]) -> NDArray[np.uint64]:
    value = value + _GAMMA
    value = (value ^ (value >> np.uint64(30))) * _FIRST
    value = (value ^ (value >> np.uint64(27))) * _SECOND
    return value ^ (value >> np.uint64(31))


def random_rows(tokens: Sequence[NextToken], vocab_size: int, device: torch.device) -> RandomRows | None:
    """How the rows are drawn whose token is not the most likely one. Does not wait for the device."""
    rows = [row for row, token in enumerate(tokens) if not token.is_greedy]
    if not rows:
        return None
    chosen = [tokens[row] for row in rows]
    noise = uniform([token.request.seed for token in chosen], [token.position for token in chosen])
    return RandomRows(
        rows=upload(torch.tensor(rows), device),
        temperature=upload(torch.tensor([token.sampling.temperature for token in chosen]), device),
        uniform=upload(torch.from_numpy(noise), device),
        filters=_filters([token.sampling for token in chosen], vocab_size, device),
    )


def _filters(samplings: Sequence[SamplingParams], vocab_size: int, device: torch.device) -> SamplingFilters | None:
    rows = [row for row, s in enumerate(samplings) if s.top_k or s.top_p < 1.0 or s.min_p > 0.0]
    if not rows:
        return None
    return SamplingFilters(
        rows=upload(torch.tensor(rows), device),
        top_k=upload(torch.tensor([min(s.top_k or vocab_size, vocab_size) for s in samplings]), device),
        top_p=upload(torch.tensor([float(s.top_p) for s in samplings]), device),
        min_p=upload(torch.tensor([float(s.min_p) for s in samplings]), device),
    )


def _entries(pairs: Sequence[tuple[int, int]], device: torch.device) -> LogitEntries:
    """pairs: row and token id of each entry."""
    return LogitEntries(*torch.tensor([*zip(*pairs, strict=True)], dtype=torch.int64, device=device).unbind())


def row_penalties(tokens: Sequence[NextToken]) -> RowPenalties | None:
    """The penalties of the tokens, if one of them has any. Those without drafts stay valid from step to step."""
    samplings = [token.sampling for token in tokens]
    counted = [token.penalty_counts if token.sampling.has_penalties else NOTHING_COUNTED for token in tokens]
    if not any(map(len, counted)):
        return None
    factors = [(s.presence_penalty, s.frequency_penalty, s.repetition_penalty) for s in samplings]
    token_ids, counts = (tuple(getattr(each, name) for each in counted) for name in ("token_ids", "counts"))
    return RowPenalties(token_ids, counts, np.ascontiguousarray(np.array(factors, np.float32).T))


def _bias(tokens: Sequence[NextToken], device: torch.device) -> LogitBias | None:
    pairs: list[tuple[int, int]] = []
    values: list[float] = []
    for row, token in enumerate(tokens):
        biases = token.biases()
        pairs += [(row, token_id) for token_id in biases]
        values += biases.values()
    if not pairs:
        return None
    return LogitBias(_entries(pairs, device), torch.tensor(values, dtype=torch.float32, device=device))


def _logprob_rows(tokens: Sequence[NextToken], device: torch.device) -> LogprobRows | None:
    counts = {row: t.sampling.logprobs for row, t in enumerate(tokens) if t.sampling.logprobs is not None}
    return LogprobRows(torch.tensor([*counts], device=device), counts) if counts else None
