"""From logits to tokens, for all rows at once.

    penalties -> logit bias -> grammar -> argmax if greedy, else temperature -> min-p, top-k, top-p -> one draw

A draw inverts the cumulative distribution, in the order of the vocabulary, at a point that depends on seed and position
alone. This costs one random number per row; the Gumbel trick would cost one per entry of the vocabulary. The filters
only ever set probabilities to zero, so a row's token does not depend on what the other rows of the batch asked for.

Minimal path 9 of 9.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from backend.engine.masks import AllowedTokens
from backend.engine.outputs import TokenLogprob
from backend.engine.sampling_batch import SamplingBatch
from backend.ops.base import Ops
from backend.ops.reference import ReferenceOps

REFERENCE = ReferenceOps()


@dataclass(slots=True)
class SampledToken:
    """The token sampled from one row of logits."""

    token_id: int
    logprobs: tuple[TokenLogprob, ...]  # one, or none if not requested


def sample(
    logits: Tensor, batch: SamplingBatch, allowed: AllowedTokens | None = None, ops: Ops = REFERENCE
) -> list[SampledToken]:
    """Samples one token per row. logits: [N, vocab_size] in float32 or the model's dtype, may be overwritten."""
    wanted, penalties = batch.logprobs, batch.penalties
    if wanted or batch.bias or allowed:
        logits = ops.logits(logits, 1.0, None)
    raw_logits, raw_rows = logits, wanted.rows if wanted else None
    if wanted and (penalties or batch.bias or allowed):
        raw_logits, raw_rows = logits[wanted.rows], None  # a copy, since the next operations may overwrite the logits
    if penalties and (batch.bias or allowed):
        logits, penalties = ops.penalise(logits, penalties.entries(logits.device)), None
    if batch.bias:
        logits = ops.add_bias(logits, batch.bias)
    if allowed:
        logits = ops.forbid(logits, allowed.rows, allowed.bitmask)
    chosen = ops.choose(logits, batch.random, penalties)
    logprobs: dict[int, tuple[TokenLogprob, ...]] = {}
    if wanted:
        scored = score(raw_logits, raw_rows, chosen[wanted.rows], [*wanted.counts.values()], ops)
        logprobs = {row: (logprob,) for row, logprob in zip(wanted.counts, scored, strict=True)}
    return [SampledToken(token_id, logprobs.get(row, ())) for row, token_id in enumerate(chosen.tolist())]


def score(
    logits: Tensor, rows: Tensor | None, token_ids: Tensor, counts: Sequence[int], ops: Ops = REFERENCE
) -> list[TokenLogprob]:
    """The log-probabilities that rows of logits (None: all) give to these tokens, each with `counts` alternatives.

    logits: [N, vocab_size] float32, as the model computed them; rows, token_ids: [L].
    """
    scores = ops.logprobs(logits, rows, token_ids, max(counts))
    columns = (each.tolist() for each in (token_ids, scores.own, scores.top_ids, scores.top, scores.ranks))
    return [
        TokenLogprob(token_id, value, tuple(zip(top_ids, top_values, strict=True))[:count], rank)
        for count, token_id, value, top_ids, top_values, rank in zip(counts, *columns, strict=True)
    ]
