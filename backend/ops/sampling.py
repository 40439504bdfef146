"""The arguments and results of sampling operations, as contiguous tensors."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class LogitEntries:
    """E single entries of the logits, no entry twice."""

    rows: Tensor  # [E] int64
    token_ids: Tensor  # [E] int64


@dataclass(frozen=True, slots=True)
class Penalties:
    """The penalties for E tokens that have occurred in their row."""

    entries: LogitEntries
    output_counts: Tensor  # [E] float32; 0 for a token that occurred in the prompt only
    presence: Tensor  # [E] float32
    frequency: Tensor  # [E] float32
    repetition: Tensor  # [E] float32


@dataclass(frozen=True, slots=True)
class LogitBias:
    """Values to add to single entries."""

    entries: LogitEntries
    values: Tensor  # [E] float32; -inf forbids a token


@dataclass(frozen=True, slots=True)
class SamplingFilters:
    """Which tokens of R random rows may be sampled: those that pass top-k, min-p and top-p.

    In order of falling probability: the first `top_k`, as long as they have at least `min_p` times the probability of
    the first; and of these the first that together have `top_p` of their sum. Tokens as likely as the last one kept are
    kept, too, and the first is kept in any case.
    """

    rows: Tensor  # [F] int64: those of the R rows that have any filter, at least one
    top_k: Tensor  # [R] int64; the size of the vocabulary if it is off
    top_p: Tensor  # [R] float32; 1 if it is off
    min_p: Tensor  # [R] float32; 0 if it is off


@dataclass(frozen=True, slots=True)
class RandomRows:
    """The R rows that are sampled, not greedy."""

    rows: Tensor  # [R] int64, ascending
    temperature: Tensor  # [R] float32
    uniform: Tensor  # [R] float64, in [0, 1)
    filters: SamplingFilters | None


@dataclass(frozen=True, slots=True)
class LogprobTensors:
    """The log-probabilities of L rows: of one token each, and of the n most likely ones."""

    own: Tensor  # [L] float32
    ranks: Tensor  # [L] int64: 1 + the number of tokens with a larger logit
    top_ids: Tensor  # [L, n] int64, the most likely first; of equals, the lowest id first
    top: Tensor  # [L, n] float32
