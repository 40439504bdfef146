"""Argument and result types of the sampling operations of `Ops`. All tensors are contiguous."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class LogitEntries:
    """Positions of E different entries of the logits."""

    rows: Tensor  # [E] int64
    token_ids: Tensor  # [E] int64


@dataclass(frozen=True, slots=True)
class Penalties:
    """Presence, frequency and repetition penalties for E tokens that have occurred in their row."""

    entries: LogitEntries
    output_counts: Tensor  # [E] float32; 0 for a token that occurred in the prompt only
    presence: Tensor  # [E] float32
    frequency: Tensor  # [E] float32
    repetition: Tensor  # [E] float32


@dataclass(frozen=True, slots=True)
class LogitBias:
    """Values to add to single entries of the logits."""

    entries: LogitEntries
    values: Tensor  # [E] float32; -inf forbids a token


@dataclass(frozen=True, slots=True)
class SamplingFilters:
    """Filters top-k, min-p and top-p of R random rows. They decide which tokens may be sampled.

    Tokens are in order of falling probability. The filters keep the first `top_k` tokens whose probability is at least
    `min_p` times that of the first token. From these, they keep the first tokens whose probabilities sum to `top_p` of
    the total. Tokens as likely as the last kept token are also kept. The first token is always kept.
    """

    rows: Tensor  # [F] int64: the rows of the R rows that have a filter; F is at least 1
    top_k: Tensor  # [R] int64; the size of the vocabulary if it is off
    top_p: Tensor  # [R] float32; 1 if it is off
    min_p: Tensor  # [R] float32; 0 if it is off


@dataclass(frozen=True, slots=True)
class RandomRows:
    """Sampling parameters of the R rows whose token is sampled at random. The other rows are greedy."""

    rows: Tensor  # [R] int64, ascending
    temperature: Tensor  # [R] float32
    uniform: Tensor  # [R] float64, in [0, 1)
    filters: SamplingFilters | None


@dataclass(frozen=True, slots=True)
class LogprobTensors:
    """Log-probabilities of L rows, for one token per row and for the n most likely tokens of each row."""

    own: Tensor  # [L] float32
    ranks: Tensor  # [L] int64: 1 + the number of tokens with a larger logit
    top_ids: Tensor  # [L, n] int64, the most likely first; equally likely tokens in the order of their ids
    top: Tensor  # [L, n] float32
