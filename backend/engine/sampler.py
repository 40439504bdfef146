"""From logits to tokens, for all rows at once.

    penalties -> logit bias -> grammar -> argmax where greedy, else temperature -> min-p, top-k, top-p -> one draw

A draw inverts the cumulative distribution, in the order of the vocabulary, at a point that is a function of seed and
position alone. It costs one number per row where the Gumbel trick costs one per entry of the vocabulary, and since
the filters only ever set probabilities to zero, a row's token does not depend on what its neighbours asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from backend.engine.masks import AllowedTokens
from backend.engine.request import TokenLogprob
from backend.engine.sampling_batch import Bias, Filters, Penalties, RandomRows, SamplingBatch, WantedLogprobs
from backend.ops.base import Ops
from backend.ops.reference import ReferenceOps, invert

REFERENCE = ReferenceOps()
SHORTLIST_SIZES = (256, 8192)  # how many of the likeliest tokens are sorted before all are


@dataclass(frozen=True, slots=True)
class Sampled:
    token_id: int
    logprobs: tuple[TokenLogprob, ...]  # one, or none if it was not asked for


def sample(
    logits: Tensor, batch: SamplingBatch, allowed: AllowedTokens | None = None, ops: Ops = REFERENCE
) -> list[Sampled]:
    """logits: [N, vocab_size] float32, not changed."""
    adjusted = logits
    if batch.penalties:
        adjusted = _penalise(adjusted, batch.penalties)
    if batch.bias:
        adjusted = _bias(adjusted, batch.bias)
    if allowed:
        adjusted = _forbid(adjusted, allowed)
    if batch.random and len(batch.random.rows) == len(logits):
        chosen = draw(adjusted, batch.random, ops)
    else:
        chosen = ops.argmax(adjusted)
        if batch.random:
            chosen[batch.random.rows] = draw(adjusted[batch.random.rows], batch.random, ops)
    logprobs = _logprobs(logits, chosen, batch.logprobs) if batch.logprobs else {}
    return [Sampled(token_id, logprobs.get(row, ())) for row, token_id in enumerate(chosen.tolist())]


def score(logits: Tensor, token_ids: Tensor, counts: Sequence[int]) -> list[TokenLogprob]:
    """The log-probabilities that rows of logits give to these tokens, each with so many alternatives.

    logits: [N, vocab_size], token_ids: [N]. The model's own: nothing has been done to its logits.
    """
    logprobs = torch.log_softmax(logits, dim=-1)
    own = logprobs.gather(-1, token_ids[:, None])
    ranks = (logprobs > own).sum(dim=-1) + 1
    top = logprobs.topk(min(max(counts), logits.shape[-1]), dim=-1)
    columns = (token_ids.tolist(), own.squeeze(-1).tolist(), top.indices.tolist(), top.values.tolist(), ranks.tolist())
    return [
        TokenLogprob(token_id, value, tuple(zip(top_ids, top_values, strict=True))[:count], rank)
        for count, token_id, value, top_ids, top_values, rank in zip(counts, *columns, strict=True)
    ]


def probabilities(logits: Tensor, random: RandomRows) -> Tensor:
    """What tokens are drawn by, up to a factor per row. logits, result: [R, vocab_size]."""
    unfiltered = torch.softmax(logits / random.temperature[:, None], dim=-1)
    if not random.filters:
        return unfiltered
    rows = random.filters.rows
    if len(rows) == len(unfiltered):
        return unfiltered.masked_fill_(unfiltered < _threshold(unfiltered, random.filters), 0.0)
    filtered = unfiltered[rows]
    return unfiltered.index_copy_(0, rows, filtered.masked_fill_(filtered < _threshold(filtered, random.filters), 0.0))


def _penalise(logits: Tensor, penalties: Penalties) -> Tensor:
    index = (penalties.entries.rows, penalties.entries.token_ids)
    values = logits[index]
    values = torch.where(values > 0, values / penalties.repetition, values * penalties.repetition)
    values -= penalties.frequency * penalties.output_counts
    values -= penalties.presence * (penalties.output_counts > 0)
    return logits.index_put(index, values)


def _bias(logits: Tensor, bias: Bias) -> Tensor:
    return logits.index_put((bias.entries.rows, bias.entries.token_ids), bias.values, accumulate=True)


def _forbid(logits: Tensor, allowed: AllowedTokens) -> Tensor:
    bits = torch.arange(32, dtype=torch.int32, device=logits.device)
    is_allowed = (allowed.bitmask[:, :, None] >> bits & 1).bool().flatten(1)[:, : logits.shape[-1]]
    return logits.index_copy(0, allowed.rows, logits[allowed.rows].masked_fill(~is_allowed, float("-inf")))


def draw(logits: Tensor, random: RandomRows, ops: Ops = REFERENCE) -> Tensor:
    """logits: [R, vocab_size] -> [R]. Without filters, nothing of it waits for a device."""
    if not random.filters:
        return ops.draw(logits, random.temperature, random.uniform)
    rows = random.filters.rows
    if len(rows) == len(logits):
        return invert(probabilities(logits, random), random.uniform)
    drawn = ops.draw(logits, random.temperature, random.uniform)
    filters = replace(random.filters, rows=torch.arange(len(rows), device=rows.device))
    filtered = RandomRows(rows, random.temperature[rows], random.uniform[rows], filters)
    drawn[rows] = invert(probabilities(logits[rows], filtered), filtered.uniform)
    return drawn


def _threshold(likely: Tensor, filters: Filters) -> Tensor:
    """The least probability that passes every filter, [F, 1]. Tokens that tie with it pass too.

    likely: [F, vocab_size].

    Each filter keeps a prefix of the tokens in falling order, so the shortest prefix is what all of them keep; top-p
    counts within what the other two have left. The end of that prefix mostly lies among the first few tokens, so it is
    looked for there first, and all tokens are sorted only for rows in which it is nowhere else. How far a row goes
    depends on that row alone.
    """
    vocab_size = likely.shape[-1]
    threshold = torch.empty_like(filters.top_p)
    rest = torch.arange(len(likely), device=likely.device)
    for size in (*SHORTLIST_SIZES, vocab_size):
        falling = likely.topk(min(size, vocab_size), dim=-1).values
        threshold[rest], ends = _end_of_prefix(likely, falling, filters)
        if size >= vocab_size or ends.all():
            break
        rest, likely = rest[~ends], likely[~ends]
        filters = Filters(rest, filters.top_k[~ends], filters.top_p[~ends], filters.min_p[~ends])
    return threshold


def _end_of_prefix(likely: Tensor, falling: Tensor, filters: Filters) -> tuple[Tensor, Tensor]:
    """The probability of the last token kept, [F, 1], and whether the prefix ends within `falling`, [F]."""
    ranks = torch.arange(falling.shape[-1], device=falling.device)
    least = filters.min_p * falling[:, :1]
    keep = (ranks < filters.top_k) & (falling >= least)
    kept = falling * keep
    # What top-k leaves is the head of `falling`. Without it all is left, or what passes min-p, wherever it stands:
    # summed in double precision, so that it does not matter how many threads share a sum.
    has_top_k = filters.top_k < likely.shape[-1]
    everywhere = torch.ones_like(least, dtype=torch.float64)
    if summed := (~has_top_k & (filters.min_p > 0.0)).squeeze(-1).nonzero().squeeze(-1).tolist():
        passing = likely[summed]
        passing.masked_fill_(passing < least[summed], 0.0)
        everywhere[summed] = passing.sum(dim=-1, keepdim=True, dtype=torch.float64)
    left = torch.where(has_top_k, kept.sum(dim=-1, keepdim=True, dtype=torch.float64), everywhere)
    is_all_left = ~has_top_k | (filters.top_k <= falling.shape[-1]) | (falling[:, -1:] < least)
    keep &= kept.cumsum(dim=-1) - kept < (filters.top_p * left).float()
    num_kept = keep.sum(dim=-1, keepdim=True).clamp(min=1)
    return falling.gather(-1, num_kept - 1), (is_all_left & ~keep[:, -1:]).squeeze(-1)


def _logprobs(logits: Tensor, chosen: Tensor, wanted: WantedLogprobs) -> dict[int, tuple[TokenLogprob, ...]]:
    scored = score(logits[wanted.rows], chosen[wanted.rows], [*wanted.counts.values()])
    return {row: (logprob,) for row, logprob in zip(wanted.counts, scored, strict=True)}
