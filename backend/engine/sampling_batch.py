"""What requests want of their next tokens, as tensors: one row per token that is sampled in this step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from backend.engine.lookahead import is_plain
from backend.engine.request import Request, SamplingParams
from backend.engine.token_counts import OccurrenceCounts
from backend.ops.sampling import Bias, Filters, LogitEntries, Penalties, RandomRows

GREEDY_BELOW_TEMPERATURE = 1e-5  # dividing by less overflows, and the result would be the same


@dataclass(frozen=True, slots=True)
class NextToken:
    """A token to be chosen: behind all of a request's, and behind what was drafted for it, as if that had come true."""

    request: Request
    drafts: tuple[int, ...] = ()

    @property
    def sampling(self) -> SamplingParams:
        return self.request.sampling

    @property
    def position(self) -> int:
        return len(self.request.token_ids) + len(self.drafts)

    @property
    def num_output_tokens(self) -> int:
        return self.request.num_output_tokens + len(self.drafts)

    @property
    def is_plain_greedy(self) -> bool:
        """Whether it is that of the largest logit, with nothing to be told of it."""
        return self.sampling.temperature < GREEDY_BELOW_TEMPERATURE and is_plain(self.request)

    def forbidden(self) -> list[int]:
        """The tokens that would complete a bad word."""
        words = self.sampling.bad_words
        longest = max(map(len, words), default=1)
        start = max(self.request.num_prompt_tokens, len(self.request.token_ids) - longest + 1)
        said = (*self.request.token_ids[start:], *self.drafts)
        return [word[-1] for word in words if word[:-1] == said[len(said) - len(word) + 1 :]]

    @property
    def penalised(self) -> OccurrenceCounts:
        if not self.drafts:
            return self.request.penalised
        counts = self.request.penalised.copy()
        for token_id in self.drafts:
            counts.add(token_id)
        return counts


@dataclass(frozen=True, slots=True)
class WantedLogprobs:
    """The L rows whose log-probabilities are to be reported."""

    rows: Tensor  # [L] int64
    counts: dict[int, int]  # by row, how many alternatives


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """What is wanted of N rows of logits. A part that no row asks for is None."""

    random: RandomRows | None
    penalties: Penalties | None
    bias: Bias | None
    logprobs: WantedLogprobs | None


def make_sampling_batch(tokens: Sequence[NextToken], vocab_size: int, device: torch.device) -> SamplingBatch:
    """One row per token, in this order."""
    return SamplingBatch(
        random=_random_rows(tokens, vocab_size, device),
        penalties=_penalties(tokens, device),
        bias=_bias(tokens, device),
        logprobs=_wanted_logprobs(tokens, device),
    )


def uniform(seeds: Sequence[int], positions: Sequence[int]) -> NDArray[np.float64]:
    """Noise in [0, 1) as a pure function: neither the batch, nor preemption, nor the device has a say in it.

    SplitMix64's finaliser (Steele, Lea and Flood, 2014) over seed and position, twice, so that neighbouring seeds
    and neighbouring positions have nothing in common. 52 of its bits: times a sum of floats, it stays below that sum.
    """
    mixed = _mix(np.array([seed & _MASK_64 for seed in seeds], dtype=np.uint64))
    bits = _mix(mixed + np.array(positions, dtype=np.uint64)) >> np.uint64(12)
    return bits.astype(np.float64) * 2.0**-52


_MASK_64 = (1 << 64) - 1
_GAMMA, _FIRST, _SECOND = (np.uint64(c) for c in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def _mix(value: NDArray[np.uint64]) -> NDArray[np.uint64]:
    value = value + _GAMMA
    value = (value ^ (value >> np.uint64(30))) * _FIRST
    value = (value ^ (value >> np.uint64(27))) * _SECOND
    return value ^ (value >> np.uint64(31))


def _random_rows(tokens: Sequence[NextToken], vocab_size: int, device: torch.device) -> RandomRows | None:
    rows = [row for row, token in enumerate(tokens) if token.sampling.temperature >= GREEDY_BELOW_TEMPERATURE]
    if not rows:
        return None
    chosen = [tokens[row] for row in rows]
    noise = uniform([token.request.seed for token in chosen], [token.position for token in chosen])
    return RandomRows(
        rows=torch.tensor(rows, device=device),
        temperature=torch.tensor([token.sampling.temperature for token in chosen], device=device),
        uniform=torch.from_numpy(noise).to(device),
        filters=_filters([token.sampling for token in chosen], vocab_size, device),
    )


def _filters(samplings: Sequence[SamplingParams], vocab_size: int, device: torch.device) -> Filters | None:
    rows = [row for row, s in enumerate(samplings) if s.top_k or s.top_p < 1.0 or s.min_p > 0.0]
    if not rows:
        return None
    return Filters(
        rows=torch.tensor(rows, device=device),
        top_k=torch.tensor([min(s.top_k or vocab_size, vocab_size) for s in samplings], device=device),
        top_p=torch.tensor([float(s.top_p) for s in samplings], device=device),
        min_p=torch.tensor([float(s.min_p) for s in samplings], device=device),
    )


def _entries(pairs: Sequence[tuple[int, int]], device: torch.device) -> LogitEntries:
    return LogitEntries(*torch.tensor([*zip(*pairs, strict=True)], dtype=torch.int64, device=device).unbind())


def _penalties(tokens: Sequence[NextToken], device: torch.device) -> Penalties | None:
    rows = [row for row, token in enumerate(tokens) if token.sampling.has_penalties]
    met = [tokens[row].penalised for row in rows]
    sizes = [*map(len, met)]
    if not sum(sizes):
        return None
    samplings = [tokens[row].sampling for row in rows]
    factors = [(s.presence_penalty, s.frequency_penalty, s.repetition_penalty) for s in samplings]
    token_ids = np.concatenate([np.frombuffer(each.token_ids, np.int64) for each in met])
    counts = np.concatenate([np.frombuffer(each.counts, np.float32) for each in met])
    entries = np.stack((np.repeat(np.array(rows, np.int64), sizes), token_ids))
    values = np.vstack((counts, np.repeat(np.array(factors, np.float32).T, sizes, axis=1)))
    return Penalties(
        LogitEntries(*torch.from_numpy(entries).to(device).unbind()), *torch.from_numpy(values).to(device).unbind()
    )


def _bias(tokens: Sequence[NextToken], device: torch.device) -> Bias | None:
    pairs: list[tuple[int, int]] = []
    values: list[float] = []
    for row, token in enumerate(tokens):
        sampling = token.sampling
        biases = dict(sampling.logit_bias)
        if sampling.bad_words:
            biases.update(dict.fromkeys(token.forbidden(), float("-inf")))
        if token.num_output_tokens < sampling.min_tokens:
            biases.update(dict.fromkeys(sampling.stop_token_ids, float("-inf")))
        pairs += [(row, token_id) for token_id in biases]
        values += biases.values()
    if not pairs:
        return None
    return Bias(_entries(pairs, device), torch.tensor(values, dtype=torch.float32, device=device))


def _wanted_logprobs(tokens: Sequence[NextToken], device: torch.device) -> WantedLogprobs | None:
    counts = {row: t.sampling.logprobs for row, t in enumerate(tokens) if t.sampling.logprobs is not None}
    return WantedLogprobs(torch.tensor([*counts], device=device), counts) if counts else None
