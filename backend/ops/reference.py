"""Operations in plain torch, which run on every device. Tests compare the faster implementations with this one."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from backend.ops.base import INT4_GROUP, MXFP4_VALUES, Ops
from backend.ops.int4 import to_int4
from backend.ops.sampling import (
    LogitBias,
    LogprobTensors,
    Penalties,
    RandomRows,
    RowPenalties,
    SamplingFilters,
    StepRows,
)

SHORTLIST_SIZES = (256, 8192)  # most likely tokens to sort first; all tokens are sorted only if these are too few


class ReferenceOps(Ops):
    """Reference implementation of the operations. Faster implementations derive from it and override methods."""

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None, gate: str | None = None) -> Tensor:
        return self.gated(F.linear(x, weight, bias), gate)

    def linear_int8(
        self, x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None, gate: str | None = None
    ) -> Tensor:
        return self.gated(F.linear(x, (weight * scales[:, None]).to(x.dtype), bias), gate)

    def to_int4(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        return to_int4(weight)

    def linear_int4(self, x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(x, _dequantised(_codes(weight).float() - 8, scales).to(x.dtype), bias)

    def linear_mxfp4(self, x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
        values = torch.tensor(MXFP4_VALUES, dtype=torch.float32, device=weight.device)
        return F.linear(x, _dequantised(values[_codes(weight).long()], scales).to(x.dtype), bias)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return F.rms_norm(x.to(weight.dtype), weight.shape, weight, eps).to(x.dtype)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        residual = x + residual
        return self.rms_norm(residual, weight, eps), residual

    def rope(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        if not (rotary_dim := 2 * cos.shape[1]):
            return x
        first, second = x[..., :rotary_dim].float().chunk(2, dim=-1)
        cos, sin = cos[:, None], sin[:, None]
        pairs = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
        return torch.cat((pairs, x[..., rotary_dim:]), dim=-1)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up

    def gelu_mul(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.gelu(gate, approximate="tanh") * up

    def store_kv(self, key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor) -> None:
        """Writes to views of the caches with one row per slot, because slots are numbered over all blocks."""
        key_cache.flatten(0, 1).index_copy_(0, slots, key)
        value_cache.flatten(0, 1).index_copy_(0, slots, value)

    def argmax(self, logits: Tensor) -> Tensor:
        return logits.argmax(dim=-1)

    def choose(self, scores: Tensor, random: RandomRows | None, penalties: RowPenalties | None) -> Tensor:
        if random or penalties:
            scores = self.logits(scores, 1.0, None)
        if penalties:
            scores = self.penalise(scores, penalties.entries(scores.device))
        if random and len(random.rows) == len(scores):
            return self.draw(scores, random)
        chosen = self.argmax(scores)
        if random:
            chosen[random.rows] = self.draw(scores, random)
        return chosen

    def penalise(self, logits: Tensor, penalties: Penalties) -> Tensor:
        index = (penalties.entries.rows, penalties.entries.token_ids)
        values = logits[index]
        values = torch.where(values > 0, values / penalties.repetition, values * penalties.repetition)
        values -= penalties.frequency * penalties.output_counts
        values -= penalties.presence * (penalties.output_counts > 0)
        return logits.index_put(index, values)

    def add_bias(self, logits: Tensor, bias: LogitBias) -> Tensor:
        return logits.index_put((bias.entries.rows, bias.entries.token_ids), bias.values, accumulate=True)

    def forbid(self, logits: Tensor, rows: Tensor, allowed: Tensor) -> Tensor:
        """Unpacks the bitmask and masks the rows with it."""
        bits = torch.arange(32, dtype=torch.int32, device=logits.device)
        is_allowed = (allowed[:, :, None] >> bits & 1).bool().flatten(1)[:, : logits.shape[-1]]
        return logits.index_copy(0, rows, logits[rows].masked_fill(~is_allowed, float("-inf")))

    def draw(self, logits: Tensor, random: RandomRows) -> Tensor:
        """Computes the filtered probabilities and inverts their cumulative distribution."""
        return invert(probabilities(logits, random), random.uniform)

    def logprobs(self, logits: Tensor, rows: Tensor | None, token_ids: Tensor, num_top: int) -> LogprobTensors:
        if rows is not None:
            logits = logits[rows]
        token_ids = token_ids[:, None]
        ranks = (logits > logits.gather(-1, token_ids)).sum(dim=-1) + 1
        top_ids = first_of(logits, min(num_top, logits.shape[-1]))
        logprobs = torch.log_softmax(logits, dim=-1)
        return LogprobTensors(logprobs.gather(-1, token_ids).squeeze(-1), ranks, top_ids, logprobs.gather(-1, top_ids))

    def sample_rows(self, logits: Tensor, rows: StepRows, *, has_changes: bool) -> Tensor:
        """By the operations that also sample outside of captured steps. Waits for the device."""
        if has_changes:
            rows.count_inputs()
            logits = self._changed(logits.clone(), rows)
        chosen, random = self.argmax(logits), rows.random()
        if len(random.rows):
            chosen[random.rows] = self.draw(logits, random)
        return chosen

    def _changed(self, logits: Tensor, rows: StepRows) -> Tensor:
        """Applies penalties, biases and masks."""
        if len((penalties := rows.penalties()).entries.rows):
            logits = self.penalise(logits, penalties)
        if len((bias := rows.bias()).entries.rows):
            logits = self.add_bias(logits, bias)
        if len(masked := (rows.mask_rows >= 0).nonzero().squeeze(1)):
            logits = self.forbid(logits, masked, rows.masks[rows.mask_rows[masked]])
        return logits

    def score_rows(self, logits: Tensor, rows: StepRows, token_ids: Tensor, num_top: int) -> LogprobTensors:
        return self.logprobs(logits, None, token_ids, num_top)


def first_of(logits: Tensor, count: int) -> Tensor:
    """Returns the indexes of the largest logits of each row in falling order: [N, vocab_size] -> [N, count] int64.

    Equal logits are in the order of their indexes, unlike in torch's `topk`.
    """
    if count == 0:
        return torch.empty((len(logits), 0), dtype=torch.int64, device=logits.device)
    least = logits.topk(count, dim=-1).values[:, -1:]
    rows, ids = (~(logits < least)).nonzero().unbind(-1)  # at least `count` per row, and more only if logits are equal
    falling = logits[rows, ids].sort(descending=True, stable=True).indices
    falling = falling[rows[falling].sort(stable=True).indices]
    begins = torch.searchsorted(rows, torch.arange(len(logits), device=rows.device))
    return ids[falling[begins[:, None] + torch.arange(count, device=rows.device)]]


def probabilities(logits: Tensor, random: RandomRows) -> Tensor:
    """Returns the filtered probabilities of the random rows: [N, vocab_size] -> [R, vocab_size].

    A row need not sum to one, because filters set probabilities to zero without rescaling the others.
    """
    if len(random.rows) < len(logits):
        logits = logits[random.rows]
    unfiltered = torch.softmax(logits / random.temperature[:, None], dim=-1)
    if not random.filters:
        return unfiltered
    rows = random.filters.rows
    if len(rows) == len(unfiltered):
        return unfiltered.masked_fill_(unfiltered < _threshold(unfiltered, random.filters), 0.0)
    filtered = unfiltered[rows]
    return unfiltered.index_copy_(0, rows, filtered.masked_fill_(filtered < _threshold(filtered, random.filters), 0.0))


def invert(probs: Tensor, shares: Tensor) -> Tensor:
    """Returns, for each row, the first token at which the cumulative sum exceeds the row's share of the total.

    probs: [N, vocab_size], at least 0. shares: [N] float64 in [0, 1). Result: [N] int64.
    """
    # In double precision, the sum is exact enough that every token of a vocabulary of any size can be sampled.
    cumulative = probs.double().cumsum(dim=-1)
    points = shares[:, None] * cumulative[:, -1:]
    chosen = torch.searchsorted(cumulative, points, right=True).squeeze(-1)
    return chosen.clamp(max=probs.shape[-1] - 1)  # NaN logits must not give an index beyond the vocabulary


def _threshold(probs: Tensor, filters: SamplingFilters) -> Tensor:
    """Returns the smallest probability that the filters keep, [F, 1], for the F rows with a filter.

    probs: [F, vocab_size]. In falling order of probability, each filter keeps a prefix of the tokens. So all filters
    together keep the shortest of these prefixes. top-p applies to the tokens that the other two filters keep. The end
    of the shortest prefix is usually among the first few tokens, so these are searched first. All tokens are sorted
    only for rows with a longer prefix. The number of tokens that are sorted for a row depends on that row only.
    """
    vocab_size = probs.shape[-1]
    columns = [column[filters.rows, None] for column in (filters.top_k, filters.top_p, filters.min_p)]
    threshold = torch.empty_like(probs[:, :1])
    rest = torch.arange(len(probs), device=probs.device)
    for size in (*SHORTLIST_SIZES, vocab_size):
        falling = probs.topk(min(size, vocab_size), dim=-1).values
        threshold[rest], ends = _end_of_prefix(probs, falling, *columns)
        if size >= vocab_size or ends.all():
            break
        rest, probs, *columns = (each[~ends] for each in (rest, probs, *columns))
    return threshold


def _end_of_prefix(
    probs: Tensor, falling: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor
) -> tuple[Tensor, Tensor]:
    """Returns the probability of the last token kept, [F, 1], and whether the prefix ends within `falling`, [F].

    top_k, top_p, min_p: [F, 1].
    """
    ranks = torch.arange(falling.shape[-1], device=falling.device)
    least = min_p * falling[:, :1]
    keep = (ranks < top_k) & (falling >= least)
    kept = falling * keep
    # The total that top-p refers to. With top-k, it is the sum of the kept tokens at the head of `falling`. Without
    # top-k, it is 1, or the sum of all tokens that pass min-p. That sum is in double precision, so that the number of
    # threads does not change the result.
    has_top_k = top_k < probs.shape[-1]
    everywhere = torch.ones_like(least, dtype=torch.float64)
    if summed := (~has_top_k & (min_p > 0.0)).squeeze(-1).nonzero().squeeze(-1).tolist():
        passing = probs[summed]
        passing.masked_fill_(passing < least[summed], 0.0)
        everywhere[summed] = passing.sum(dim=-1, keepdim=True, dtype=torch.float64)
    left = torch.where(has_top_k, kept.sum(dim=-1, keepdim=True, dtype=torch.float64), everywhere)
    is_all_left = ~has_top_k | (top_k <= falling.shape[-1]) | (falling[:, -1:] < least)
    keep &= kept.cumsum(dim=-1) - kept < (top_p * left).float()
    num_used = keep.sum(dim=-1, keepdim=True).clamp(min=1)
    return falling.gather(-1, num_used - 1), (is_all_left & ~keep[:, -1:]).squeeze(-1)


def _codes(weight: Tensor) -> Tensor:
    """Unpacks four-bit codes: [out, in / 2] -> [out, in / INT4_GROUP, INT4_GROUP]."""
    groups = weight.view(len(weight), -1, INT4_GROUP // 2)
    return torch.cat((groups & 15, groups >> 4), dim=-1)


def _dequantised(values: Tensor, scales: Tensor) -> Tensor:
    """Multiplies values [out, G, INT4_GROUP] by their groups' scales [out, G] and returns [out, in]."""
    return (values * scales[..., None].float()).flatten(1)
