"""Makes the tensors of a decode step, the commonest step by far: one token for each sequence.

The result is that of `make_batch` (batch.py), several times faster for many sequences: the matrix of block tables is
kept from step to step, since a step changes few of its rows, and so is all other memory.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from backend.attention.base import AttentionMetadata
from backend.attention.uploads import upload
from backend.engine.batch import Batch
from backend.engine.plan import ScheduledRequest
from backend.engine.prompt_images import PromptImages
from backend.engine.request import Request
from backend.engine.sampling_batch import (
    NextToken,
    SamplingBatch,
    make_sampling_batch,
    mix_seeds,
    random_rows,
    row_penalties,
    uniform_at,
)
from backend.engine.step_adapters import StepAdapters
from backend.ops.sampling import RandomRows, RowPenalties

WIDTH_STEP = 16  # blocks by which the matrix grows at least
NOISE_STEPS = 32  # for which random numbers are computed at once


class DecodeBatches:
    """Makes the batches of one runner. Not thread-safe. A batch on a CPU is valid until the next one is made."""

    def __init__(self, block_size: int, device: torch.device) -> None:
        self._block_size = block_size
        self._device = device
        self._tables = BlockTables()
        self._tokens = SameTokens()
        self._columns = _Columns(0)

    @property
    def is_plain_or_penalised(self) -> bool:
        """Whether every token of the last batch depends on logits, temperature, filters and penalties alone."""
        return self._tokens.are_plain_or_penalised

    def is_plain_greedy(self, batch: Batch) -> bool:
        """Whether every token of a batch that `make` has made is the argmax of unchanged logits."""
        if self._tokens.are_plain_or_penalised:
            return self._tokens.are_greedy
        return all(token.is_plain_greedy for token in batch.next_tokens)

    def sampling(self, batch: Batch, vocab_size: int) -> SamplingBatch:
        """The sampling parameters of a batch that `make` has made, as `make_sampling_batch` gives them."""
        if not self._tokens.are_plain_or_penalised:
            return make_sampling_batch(batch.next_tokens, vocab_size, self._device)
        return self._tokens.sampling(batch.attention.seq_lens, vocab_size, self._device)

    def make(self, plan: Sequence[ScheduledRequest]) -> Batch:
        """The tensors of a non-empty plan, all of whose parts are decodes (`ScheduledRequest.is_decode`)."""
        size, block_size = len(plan), self._block_size
        if size != self._columns.size:
            self._columns = _Columns(size)
        columns, device = self._columns, self._device
        requests = [scheduled.request for scheduled in plan]
        starts = [scheduled.start for scheduled in plan]
        tables = self._tables.update([request.block_table for request in requests])
        next_tokens = self._tokens.of(requests)
        columns.tokens[:] = (
            [request.token_ids[-1] for request in requests],
            starts,
            [
                request.block_table[start // block_size] * block_size + start % block_size
                for request, start in zip(requests, starts, strict=True)
            ],
        )
        if self._tokens.position_offsets is not None:
            columns.tokens[1] += self._tokens.position_offsets
        columns.kv_lens[:] = seq_lens = tuple([start + 1 for start in starts])
        input_ids, positions, slots, rows, kv_lens, cu_seqlens = columns.on(device)
        return Batch(
            input_ids=input_ids,
            positions=positions,
            slot_mapping=slots,
            next_tokens=next_tokens,
            sampled=columns.row_numbers,
            sampled_rows=rows,
            attention=AttentionMetadata(
                query_lens=columns.ones,
                seq_lens=seq_lens,
                kv_lens=kv_lens,
                cu_seqlens_q=cu_seqlens,
                block_tables=upload(tables, device),
                block_size=block_size,
            ),
            output_lens=columns.ones,
            adapters=StepAdapters.of(plan, columns.ones, columns.ones, device) if self._tokens.have_adapters else None,
        )


class _Columns:
    """The numbers of a step of `size` sequences, besides block tables, in arrays and in tensors over their memory.

    They are made once for many steps. After a step has read all weights, no cache has the code and data of Python and
    torch any more, so each call takes ten times as long as otherwise.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.ones = (1,) * size
        self.row_numbers = tuple(range(size))
        self.tokens = np.empty((3, size), np.int64)  # ids, positions and slots
        self.kv_lens = np.empty(size, np.int32)
        others = np.arange(size), self.kv_lens, np.arange(size + 1, dtype=np.int32)
        self._tensors = tuple(map(torch.from_numpy, (self.tokens, *others)))
        self._columns = (*self._tensors[0].unbind(), *self._tensors[1:])

    def on(self, device: torch.device) -> tuple[Tensor, ...]:
        """The ids, positions, slots, numbers of the rows, lengths, and starts of the sequences: [B], and [B + 1]."""
        if device.type == "cpu":
            return self._columns
        tokens, *others = (upload(tensor, device) for tensor in self._tensors)
        return (*tokens.unbind(), *others)


class SameTokens:
    """The tokens to sample for the same requests, step after step, and what does not change about them."""

    def __init__(self) -> None:
        self._requests: list[Request] = []
        self._tokens: tuple[NextToken, ...] = ()
        self._random: RandomRows | None = None
        self._penalties: RowPenalties | None = None  # from when a token with a penalty has occurred
        self._have_penalties = False
        self._noise = Noise([])
        self._rows: list[int] = []  # that are sampled at random
        self.are_plain_or_penalised = False  # each token depends on logits, temperature, filters and penalties alone
        self.are_greedy = False  # and is the argmax of unchanged logits
        self.have_adapters = False
        self.position_offsets: NDArray[np.int64] | None = None  # between the positions and the indexes of tokens

    def of(self, requests: list[Request]) -> tuple[NextToken, ...]:
        """The next token of each request."""
        if requests != self._requests:  # requests are equal if they are identical
            self._requests, self._tokens = requests, tuple(map(NextToken, requests))
            self._random = self._penalties = None
            self._have_penalties = any(request.sampling.has_penalties for request in requests)
            self.are_plain_or_penalised = all(each.is_plain_or_penalised and not each.grammar for each in requests)
            self._rows = [row for row, token in enumerate(self._tokens) if not token.is_greedy]
            self._noise = Noise([requests[row].seed for row in self._rows])
            self.are_greedy = not self._rows and all(each.is_plain and not each.grammar for each in requests)
            self.have_adapters = any(request.adapter for request in requests)
            images = [request.images for request in requests]
            self.position_offsets = _position_offsets(images) if any(images) else None
        return self._tokens

    def sampling(self, positions: Sequence[int], vocab_size: int, device: torch.device) -> SamplingBatch:
        """The sampling parameters of tokens at these positions, if `are_plain_or_penalised`.

        Only the noise differs from the last step's. The penalties refer to the counts of the requests.
        """
        if self._have_penalties and not self._penalties:
            self._penalties = row_penalties(self._tokens)
        if self._rows:
            self._random = random = self._random or random_rows(self._tokens, vocab_size, device)
            assert random
            is_all = len(self._rows) == len(positions)
            noise = self._noise.at(positions if is_all else [positions[row] for row in self._rows])
            self._random = RandomRows(random.rows, random.temperature, noise.to(device), random.filters)
        return SamplingBatch(self._random, self._penalties, None, None)


def _position_offsets(images: Sequence[PromptImages | None]) -> NDArray[np.int64]:
    return np.array([each.position_offset(each.end) if each else 0 for each in images], np.int64)


class Noise:
    """The random numbers of the same requests, computed for several steps at once. Usually all advance by one token."""

    def __init__(self, seeds: Sequence[int]) -> None:
        self._seeds = mix_seeds(seeds)
        self._start: list[int] = []  # the positions of the first row of `_ahead`
        self._ahead = torch.empty(0, len(seeds), dtype=torch.float64)  # a row for each step

    def at(self, positions: Sequence[int]) -> Tensor:
        """The numbers of the requests' tokens at these positions, [R] float64."""
        step = positions[0] - self._start[0] if self._start else 0
        if not 0 <= step < len(self._ahead) or [start + step for start in self._start] != [*positions]:
            step, self._start = 0, [*positions]
            steps = np.arange(NOISE_STEPS, dtype=np.uint64)[:, None]
            self._ahead = torch.from_numpy(uniform_at(self._seeds, np.array(positions, np.uint64) + steps))
        return self._ahead[step]


class BlockTables:
    """The block tables of some sequences as a matrix, padded with block 0. Only rows that have changed are written.

    Relies on what the scheduler guarantees: the list of a request's blocks only grows; a preemption replaces it.
    """

    def __init__(self) -> None:
        self._matrix = np.zeros((0, 0), np.int32)
        self._tensor = torch.from_numpy(self._matrix)
        self._tables: list[list[int]] = []  # by row; kept, so that no other list has the same id
        self._lens: list[int] = []

    def update(self, tables: list[list[int]]) -> Tensor:
        """The matrix of these tables, in int32. Valid until the next call."""
        lens = [*map(len, tables)]
        width = self._matrix.shape[1]
        if max(lens) > width:
            width = max(lens) + WIDTH_STEP
        if width > self._matrix.shape[1] or tables != self._tables:  # quick: equal elements are identical ones
            self._rearrange(tables, width)
        for row, (length, known) in enumerate(zip(lens, self._lens, strict=True)):
            if length != known:
                self._matrix[row, known:length] = tables[row][known:]
        self._lens = lens
        return self._tensor

    def _rearrange(self, tables: list[list[int]], width: int) -> None:
        """Moves the known rows to their new places. The other rows are empty."""
        rows = {id(table): row for row, table in enumerate(self._tables)}
        sources = [rows.get(id(table), -1) for table in tables]
        matrix = np.zeros((len(tables), width), np.int32)
        kept = [row for row, source in enumerate(sources) if source >= 0]
        if kept:
            matrix[kept, : self._matrix.shape[1]] = self._matrix[[sources[row] for row in kept]]
        self._lens = [self._lens[source] if source >= 0 else 0 for source in sources]
        self._matrix, self._tables, self._tensor = matrix, tables, torch.from_numpy(matrix)
