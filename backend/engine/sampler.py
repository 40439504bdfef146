"""From logits to tokens, for all rows at once.

    penalties -> logit bias -> grammar -> argmax where greedy, else temperature -> min-p, top-k, top-p -> one draw

A draw inverts the cumulative distribution, in the order of the vocabulary, at a point that is a function of seed and
position alone. It costs one number per row where the Gumbel trick costs one per entry of the vocabulary, and since
the filters only ever set probabilities to zero, a row's token does not depend on what its neighbours asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from backend.engine.masks import AllowedTokens
from backend.engine.request import TokenLogprob
from backend.engine.sampling_batch import SamplingBatch
from backend.ops.base import Ops
from backend.ops.reference import ReferenceOps

REFERENCE = ReferenceOps()


@dataclass(frozen=True, slots=True)
class Sampled:
    token_id: int
    logprobs: tuple[TokenLogprob, ...]  # one, or none if it was not asked for


def sample(
    logits: Tensor, batch: SamplingBatch, allowed: AllowedTokens | None = None, ops: Ops = REFERENCE
) -> list[Sampled]:
    """logits: [N, vocab_size] float32, which may be written to."""
    wanted = batch.logprobs
    models_own, own_rows = logits, wanted.rows if wanted else None
    if wanted and (batch.penalties or batch.bias or allowed):
        models_own, own_rows = logits[wanted.rows], None  # what follows may write over the others
    if batch.penalties:
        logits = ops.penalise(logits, batch.penalties)
    if batch.bias:
        logits = ops.add_bias(logits, batch.bias)
    if allowed:
        logits = ops.forbid(logits, allowed.rows, allowed.bitmask)
    if batch.random and len(batch.random.rows) == len(logits):
        chosen = ops.draw(logits, batch.random)
    else:
        chosen = ops.argmax(logits)
        if batch.random:
            chosen[batch.random.rows] = ops.draw(logits, batch.random)
    logprobs: dict[int, tuple[TokenLogprob, ...]] = {}
    if wanted:
        scored = score(models_own, own_rows, chosen[wanted.rows], [*wanted.counts.values()], ops)
        logprobs = {row: (logprob,) for row, logprob in zip(wanted.counts, scored, strict=True)}
    return [Sampled(token_id, logprobs.get(row, ())) for row, token_id in enumerate(chosen.tolist())]


def score(
    logits: Tensor, rows: Tensor | None, token_ids: Tensor, counts: Sequence[int], ops: Ops = REFERENCE
) -> list[TokenLogprob]:
    """The log-probabilities that rows of logits, or all, give to these tokens, each with so many alternatives.

    logits: [N, vocab_size] float32; rows, token_ids: [L]. The model's own: nothing has been done to its logits.
    """
    scores = ops.logprobs(logits, rows, token_ids, max(counts))
    columns = (each.tolist() for each in (token_ids, scores.own, scores.top_ids, scores.top, scores.ranks))
    return [
        TokenLogprob(token_id, value, tuple(zip(top_ids, top_values, strict=True))[:count], rank)
        for count, token_id, value, top_ids, top_values, rank in zip(counts, *columns, strict=True)
    ]
