"""From a plan to tensors: the only place where requests become tensors. Everything past it knows rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain

import torch
from torch import Tensor

from backend.attention.base import AttentionMetadata
from backend.engine.request import Request
from backend.engine.scheduler import Scheduled

GREEDY_BELOW_TEMPERATURE = 1e-5  # dividing by less overflows, and the result would be the same

_MASK_64 = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class Batch:
    """One step's input. T tokens of S sequences, one sequence after the other."""

    input_ids: Tensor  # [T] int64
    positions: Tensor  # [T] int64
    slot_mapping: Tensor  # [T] int64: block * block_size + offset
    sampled: tuple[int, ...]  # the N sequences whose next token is to be sampled, by their place in the plan
    sampled_rows: Tensor  # [N] int64: where their last tokens stand among the T
    attention: AttentionMetadata


@dataclass(frozen=True, slots=True)
class Entries:
    """E single entries of the logits."""

    rows: Tensor  # [E] int64
    token_ids: Tensor  # [E] int64


@dataclass(frozen=True, slots=True)
class Penalties:
    """For E tokens that have occurred in their row."""

    entries: Entries
    output_counts: Tensor  # [E] float32; 0 for a token that was in the prompt only
    presence: Tensor  # [E] float32
    frequency: Tensor  # [E] float32
    repetition: Tensor  # [E] float32


@dataclass(frozen=True, slots=True)
class Bias:
    entries: Entries
    values: Tensor  # [E] float32; -inf forbids a token


@dataclass(frozen=True, slots=True)
class RandomRows:
    """The R rows that are not greedy."""

    rows: Tensor  # [R] int64
    temperature: Tensor  # [R] float32
    top_k: Tensor  # [R] int64; the vocabulary's size where it is off
    top_p: Tensor  # [R] float32
    min_p: Tensor  # [R] float32
    uniform: Tensor  # [R] float64, in [0, 1)
    has_filters: bool  # whether any of top_k, top_p and min_p is on


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


def make_batch(plan: Sequence[Scheduled], block_size: int, device: torch.device) -> Batch:
    def tensor(values: Sequence[int], dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    slots: list[int] = []
    for scheduled in plan:
        table = scheduled.request.block_table
        slots += [
            table[position // block_size] * block_size + position % block_size
            for position in range(scheduled.start, scheduled.end)
        ]
    query_lens = tuple(scheduled.num_tokens for scheduled in plan)
    starts = [*accumulate(query_lens, initial=0)]
    sampled = tuple(i for i, s in enumerate(plan) if s.catches_up and not s.request.pooling)
    max_blocks = max(len(scheduled.request.block_table) for scheduled in plan)
    tables = [s.request.block_table + [0] * (max_blocks - len(s.request.block_table)) for s in plan]
    return Batch(
        input_ids=tensor([token for s in plan for token in s.request.token_ids[s.start : s.end]]),
        positions=tensor([*chain.from_iterable(range(s.start, s.end) for s in plan)]),
        slot_mapping=tensor(slots),
        sampled=sampled,
        sampled_rows=tensor([starts[i + 1] - 1 for i in sampled]),
        attention=AttentionMetadata(
            query_lens=query_lens,
            seq_lens=tuple(scheduled.end for scheduled in plan),
            cu_seqlens_q=tensor(starts, torch.int32),
            block_tables=torch.tensor(tables, dtype=torch.int32, device=device),
            block_size=block_size,
        ),
    )


def make_sampling_batch(requests: Sequence[Request], vocab_size: int, device: torch.device) -> SamplingBatch:
    """One row per request, in this order, for the token that follows each one's last."""
    return SamplingBatch(
        random=_random_rows(requests, vocab_size, device),
        penalties=_penalties(requests, device),
        bias=_bias(requests, device),
        logprobs=_wanted_logprobs(requests, device),
    )


def uniform(seed: int, position: int) -> float:
    """Noise in [0, 1) as a pure function: neither the batch, nor preemption, nor the device has a say in it.

    SplitMix64's finaliser (Steele, Lea and Flood, 2014) over seed and position, twice, so that neighbouring seeds
    and neighbouring positions have nothing in common.
    """
    bits = _mix(_mix(seed & _MASK_64) + position)
    return (bits >> 12) * 2.0**-52  # 52 bits: times a sum of floats, it stays below that sum


def _mix(value: int) -> int:
    value = (value + 0x9E3779B97F4A7C15) & _MASK_64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK_64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK_64
    return value ^ (value >> 31)


def _random_rows(requests: Sequence[Request], vocab_size: int, device: torch.device) -> RandomRows | None:
    chosen = [(row, r) for row, r in enumerate(requests) if r.sampling.temperature >= GREEDY_BELOW_TEMPERATURE]
    if not chosen:
        return None
    rows = [row for row, _ in chosen]
    wanted = [request.sampling for _, request in chosen]
    return RandomRows(
        rows=torch.tensor(rows, device=device),
        temperature=torch.tensor([s.temperature for s in wanted], device=device),
        top_k=torch.tensor([min(s.top_k or vocab_size, vocab_size) for s in wanted], device=device),
        top_p=torch.tensor([s.top_p for s in wanted], device=device),
        min_p=torch.tensor([s.min_p for s in wanted], device=device),
        uniform=torch.tensor(
            [uniform(request.seed, len(request.token_ids)) for _, request in chosen], dtype=torch.float64, device=device
        ),
        has_filters=any(s.top_k or s.top_p < 1.0 or s.min_p > 0.0 for s in wanted),
    )


def _entries(pairs: Sequence[tuple[int, int]], device: torch.device) -> Entries:
    return Entries(*torch.tensor(pairs, dtype=torch.int64, device=device).unbind(1))


def _penalties(requests: Sequence[Request], device: torch.device) -> Penalties | None:
    pairs: list[tuple[int, int]] = []
    values: list[tuple[float, float, float, float]] = []
    for row, request in enumerate(requests):
        sampling = request.sampling
        if not sampling.has_penalties:
            continue
        counts = Counter(request.token_ids[request.num_prompt_tokens :])
        for token_id in set(request.token_ids):
            pairs.append((row, token_id))
            values.append(
                (
                    counts[token_id],
                    sampling.presence_penalty,
                    sampling.frequency_penalty,
                    sampling.repetition_penalty,
                )
            )
    if not pairs:
        return None
    return Penalties(_entries(pairs, device), *torch.tensor(values, dtype=torch.float32, device=device).unbind(1))


def _bias(requests: Sequence[Request], device: torch.device) -> Bias | None:
    pairs: list[tuple[int, int]] = []
    values: list[float] = []
    for row, request in enumerate(requests):
        sampling = request.sampling
        biases = dict(sampling.logit_bias)
        if request.num_output_tokens < sampling.min_tokens:
            biases.update(dict.fromkeys(sampling.stop_token_ids, float("-inf")))
        pairs += [(row, token_id) for token_id in biases]
        values += biases.values()
    if not pairs:
        return None
    return Bias(_entries(pairs, device), torch.tensor(values, dtype=torch.float32, device=device))


def _wanted_logprobs(requests: Sequence[Request], device: torch.device) -> WantedLogprobs | None:
    counts = {row: r.sampling.logprobs for row, r in enumerate(requests) if r.sampling.logprobs is not None}
    return WantedLogprobs(torch.tensor([*counts], device=device), counts) if counts else None
