"""What is wanted of rows of logits, as contiguous tensors."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class LogitEntries:
    """E single entries of the logits, each of them once."""

    rows: Tensor  # [E] int64
    token_ids: Tensor  # [E] int64


@dataclass(frozen=True, slots=True)
class Penalties:
    """For E tokens that have occurred in their row."""

    entries: LogitEntries
    output_counts: Tensor  # [E] float32; 0 for a token that was in the prompt only
    presence: Tensor  # [E] float32
    frequency: Tensor  # [E] float32
    repetition: Tensor  # [E] float32


@dataclass(frozen=True, slots=True)
class Bias:
    entries: LogitEntries
    values: Tensor  # [E] float32; -inf forbids a token


@dataclass(frozen=True, slots=True)
class Filters:
    """Which of their tokens R random rows keep: in falling order of probability the first `top_k`, as far as they have
    `min_p` times the probability of the first, and of these the first that together have `top_p` of what these have.
    Whatever is as likely as the last of them is kept, too, and the first in any case."""

    rows: Tensor  # [F] int64: those of the R rows that have any filter, at least one
    top_k: Tensor  # [R] int64; the vocabulary's size where it is off
    top_p: Tensor  # [R] float32; 1 where it is off
    min_p: Tensor  # [R] float32; 0 where it is off


@dataclass(frozen=True, slots=True)
class RandomRows:
    """The R rows that are not greedy."""

    rows: Tensor  # [R] int64, rising
    temperature: Tensor  # [R] float32
    uniform: Tensor  # [R] float64, in [0, 1)
    filters: Filters | None


@dataclass(frozen=True, slots=True)
class LogprobTensors:
    """What L rows of logits say of one token each, and of their n likeliest ones."""

    own: Tensor  # [L] float32
    ranks: Tensor  # [L] int64: 1, and how many tokens have a larger logit
    top_ids: Tensor  # [L, n] int64, the likeliest first, and of equals the first
    top: Tensor  # [L, n] float32
