"""Argument and result types of the sampling operations of `Ops`. All tensors are contiguous."""

from __future__ import annotations

from array import array
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
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
class RowPenalties:
    """The penalties of N rows. The arrays of a row grow while the request does, and are read when a token is chosen."""

    token_ids: tuple[array[int], ...]  # [N] of int64: the tokens that have occurred; none in a row without penalties
    output_counts: tuple[array[float], ...]  # [N] of float32, as in `Penalties`
    factors: NDArray[np.float32]  # [3, N]: presence, frequency and repetition penalty

    def table(self) -> NDArray[np.int64]:
        """The addresses of each row's token ids and of their counts, and how many there are: [3, N], for a kernel.

        Valid until a token is counted.
        """
        addresses, sizes = zip(*(each.buffer_info() for each in self.token_ids), strict=True)
        return np.array((addresses, [each.buffer_info()[0] for each in self.output_counts], sizes), np.int64)

    def entries(self, device: torch.device) -> Penalties:
        """The penalties of all tokens that have occurred so far, of which there must be one."""
        sizes = [*map(len, self.token_ids)]
        rows = np.repeat(np.arange(len(sizes)), sizes)
        token_ids = np.concatenate([np.frombuffer(each, np.int64) for each in self.token_ids if each])
        counts = np.concatenate([np.frombuffer(each, np.float32) for each in self.output_counts if each])
        entries = torch.from_numpy(np.stack((rows, token_ids))).to(device)
        values = torch.from_numpy(np.vstack((counts, np.repeat(self.factors, sizes, axis=1)))).to(device)
        return Penalties(LogitEntries(*entries.unbind()), *values.unbind())


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

    def among(self, count: int, vocab_size: int) -> RandomRows:
        """All `count` rows: these, and the others with a temperature of 0."""

        def spread(values: Tensor, off: float) -> Tensor:
            return values.new_full((count,), off).index_copy_(0, self.rows, values)

        if (filters := self.filters) is not None:
            limits = spread(filters.top_k, vocab_size), spread(filters.top_p, 1.0), spread(filters.min_p, 0.0)
            filters = SamplingFilters(self.rows[filters.rows], *limits)
        rows = torch.arange(count, device=self.rows.device)
        return RandomRows(rows, spread(self.temperature, 0.0), spread(self.uniform, 0.0), filters)


NO_RANDOM_ROWS = RandomRows(torch.arange(0), torch.zeros(0), torch.zeros(0, dtype=torch.float64), None)


@dataclass(frozen=True, slots=True)
class LogprobTensors:
    """Log-probabilities of L rows, for one token per row and for the n most likely tokens of each row."""

    own: Tensor  # [L] float32
    ranks: Tensor  # [L] int64: 1 + the number of tokens with a larger logit
    top_ids: Tensor  # [L, n] int64, the most likely first; equally likely tokens in the order of their ids
    top: Tensor  # [L, n] float32


# The bits of `StepRows.flags`.
MARKED = 1  # `marks` of this row are valid
COUNTS_INPUT = 2  # `marks` does not count the row's input token yet; the bit is cleared when it does
SCORED = 4  # log-probabilities are reported

# A number of `StepRows.marks` has two parts.
SEEN_BITS = 22  # 0, or 1 + how often the token occurs in the output
MAX_SEEN = (1 << SEEN_BITS) - 1
MAX_BIASES = 511  # of a row; above the first part is 0, or the index of the token's bias, from 1 on


@dataclass(frozen=True, slots=True)
class StepRows:
    """How the S rows of a decode step are sampled that reads buffers only, such as a captured one.

    Greedy and random rows, and rows with and without penalties, biases and masks, stand side by side. Penalties, biases
    and masks apply in this order, as by `penalise`, `add_bias` and `forbid`.
    """

    input_ids: Tensor  # [S] int64: the tokens that the step computes
    flags: Tensor  # [S] int64
    temperature: Tensor  # [S] float32; 0 for a greedy row
    uniform: Tensor  # [S] float64, in [0, 1)
    top_k: Tensor  # [S] int64; the size of the vocabulary if it is off
    top_p: Tensor  # [S] float32; 1 if it is off
    min_p: Tensor  # [S] float32; 0 if it is off
    presence: Tensor  # [S] float32
    frequency: Tensor  # [S] float32
    repetition: Tensor  # [S] float32
    marks: Tensor  # [S, vocab_size] int32
    biases: Tensor  # [S, MAX_BIASES + 1] float32
    mask_rows: Tensor  # [S] int64: the row's row of `masks`; below 0 if it has none
    masks: Tensor  # [S, ceil(vocab_size / 32)] int32, as the argument of `forbid`

    def count_inputs(self) -> None:
        """Counts the input tokens of the rows with COUNTS_INPUT in `marks`, and clears the bit."""
        places = torch.arange(len(self.flags), device=self.flags.device) * self.marks.shape[1] + self.input_ids
        marks, is_wanted = self.marks.view(-1), self.flags.bitwise_and(COUNTS_INPUT).ne(0).int()
        is_new = marks[places].bitwise_and(MAX_SEEN).eq(0)
        marks.index_add_(0, places, is_wanted * (1 + is_new.int()))
        self.flags.bitwise_and_(~COUNTS_INPUT)

    def penalties(self) -> Penalties:
        """The penalties of all marked rows."""
        seen = self.marks.bitwise_and(MAX_SEEN) * self.flags.bitwise_and(MARKED).int()[:, None]
        rows, token_ids = seen.nonzero().unbind(1)
        counts = (seen[rows, token_ids] - 1).float()
        factors = (each[rows] for each in (self.presence, self.frequency, self.repetition))
        return Penalties(LogitEntries(rows, token_ids), counts, *factors)

    def bias(self) -> LogitBias:
        """The biases of all marked rows."""
        indexes = (self.marks >> SEEN_BITS) * self.flags.bitwise_and(MARKED).int()[:, None]
        rows, token_ids = indexes.nonzero().unbind(1)
        return LogitBias(LogitEntries(rows, token_ids), self.biases[rows, indexes[rows, token_ids].long()])

    def random(self) -> RandomRows:
        """The random rows, of which there may be none."""
        rows = self.temperature.nonzero().squeeze(1)
        top_k, top_p, min_p = self.top_k[rows], self.top_p[rows], self.min_p[rows]
        filtered = ((top_k < self.marks.shape[1]) | (top_p < 1.0) | (min_p > 0.0)).nonzero().squeeze(1)
        filters = SamplingFilters(filtered, top_k, top_p, min_p) if len(filtered) else None
        return RandomRows(rows, self.temperature[rows], self.uniform[rows], filters)
