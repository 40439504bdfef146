"""From logits to tokens, for all rows at once.

    penalties -> logit bias -> argmax where greedy, else temperature -> min-p, top-k, top-p -> one draw

A draw inverts the cumulative distribution, in the order of the vocabulary, at a point that is a function of seed and
position alone. It costs one number per row where the Gumbel trick costs one per entry of the vocabulary, and since
the filters only ever set probabilities to zero, a row's token does not depend on what its neighbours asked for.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from backend.engine.batch import Bias, Penalties, RandomRows, SamplingBatch, WantedLogprobs
from backend.engine.request import TokenLogprob


@dataclass(frozen=True, slots=True)
class Sampled:
    token_id: int
    logprobs: tuple[TokenLogprob, ...]  # one, or none if it was not asked for


def sample(logits: Tensor, batch: SamplingBatch) -> list[Sampled]:
    """logits: [N, vocab_size] float32, not changed."""
    adjusted = logits
    if batch.penalties:
        adjusted = _penalise(adjusted, batch.penalties)
    if batch.bias:
        adjusted = _bias(adjusted, batch.bias)
    chosen = adjusted.argmax(dim=-1)
    if batch.random:
        chosen[batch.random.rows] = _draw(adjusted[batch.random.rows], batch.random)
    logprobs = _logprobs(logits, chosen, batch.logprobs) if batch.logprobs else {}
    return [Sampled(token_id, logprobs.get(row, ())) for row, token_id in enumerate(chosen.tolist())]


def _penalise(logits: Tensor, penalties: Penalties) -> Tensor:
    index = (penalties.entries.rows, penalties.entries.token_ids)
    values = logits[index]
    values = torch.where(values > 0, values / penalties.repetition, values * penalties.repetition)
    values -= penalties.frequency * penalties.output_counts
    values -= penalties.presence * (penalties.output_counts > 0)
    return logits.index_put(index, values)


def _bias(logits: Tensor, bias: Bias) -> Tensor:
    return logits.index_put((bias.entries.rows, bias.entries.token_ids), bias.values, accumulate=True)


def _draw(logits: Tensor, random: RandomRows) -> Tensor:
    """logits: [R, vocab_size] -> [R]."""
    probabilities = torch.softmax(logits / random.temperature[:, None], dim=-1)
    if random.has_filters:
        probabilities = probabilities.masked_fill(probabilities < _threshold(probabilities, random), 0.0)
    # In double precision the sum is exact enough for every token to have its share, in a vocabulary of any size.
    cumulative = probabilities.double().cumsum(dim=-1)
    points = random.uniform[:, None] * cumulative[:, -1:]
    drawn = torch.searchsorted(cumulative, points, right=True).squeeze(-1)
    return drawn.clamp(max=logits.shape[-1] - 1)  # logits that are no numbers must not lead beyond the vocabulary


def _threshold(probabilities: Tensor, random: RandomRows) -> Tensor:
    """The least probability that passes every filter, [R, 1]. Tokens that tie with it pass too.

    Each filter keeps a prefix of the tokens in falling order, so the shortest prefix is what all of them keep; top-p
    counts within what the other two have left.
    """
    falling = probabilities.sort(dim=-1, descending=True).values
    ranks = torch.arange(falling.shape[-1], device=falling.device)
    keep = (ranks < random.top_k[:, None]) & (falling >= random.min_p[:, None] * falling[:, :1])
    kept = falling * keep
    before = kept.cumsum(dim=-1) - kept
    keep &= before < random.top_p[:, None] * kept.sum(dim=-1, keepdim=True)
    num_kept = keep.sum(dim=-1, keepdim=True).clamp(min=1)
    return falling.gather(-1, num_kept - 1)


def _logprobs(logits: Tensor, chosen: Tensor, wanted: WantedLogprobs) -> dict[int, tuple[TokenLogprob, ...]]:
    """By row: the model's own, before anything was done to its logits."""
    logprobs = torch.log_softmax(logits[wanted.rows], dim=-1)
    token_ids = chosen[wanted.rows]
    own = logprobs.gather(-1, token_ids[:, None]).squeeze(-1)
    top = logprobs.topk(min(max(wanted.counts.values()), logits.shape[-1]), dim=-1)
    columns = (token_ids.tolist(), own.tolist(), top.indices.tolist(), top.values.tolist())
    return {
        row: (TokenLogprob(token_id, value, tuple(zip(top_ids, top_values, strict=True))[:count]),)
        for (row, count), token_id, value, top_ids, top_values in zip(wanted.counts.items(), *columns, strict=True)
    }
