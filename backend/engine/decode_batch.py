"""Makes the tensors of a decode step, the commonest step by far: one token for each sequence.

The result is that of `make_batch` (batch.py), several times faster for many sequences: columns of numbers come from
numpy, and the matrix of block tables is kept from step to step, since a step changes few of its rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from backend.attention.base import AttentionMetadata
from backend.engine.batch import Batch
from backend.engine.plan import ScheduledRequest
from backend.engine.sampling_batch import NextToken

WIDTH_STEP = 16  # blocks by which the matrix grows at least


class DecodeBatches:
    """Makes the batches of one runner. Not thread-safe. A batch on a CPU is valid until the next one is made."""

    def __init__(self, block_size: int, device: torch.device) -> None:
        self._block_size = block_size
        self._device = device
        self._tables = BlockTables()

    def make(self, plan: Sequence[ScheduledRequest]) -> Batch:
        """The tensors of a non-empty plan, all of whose parts are decodes (`ScheduledRequest.is_decode`)."""
        size, block_size = len(plan), self._block_size
        requests = [scheduled.request for scheduled in plan]
        tables = self._tables.update([request.block_table for request in requests])
        tokens = np.empty((3, size), np.int64)  # ids, positions and slots
        tokens[0] = [request.token_ids[-1] for request in requests]
        tokens[1] = positions = np.array([scheduled.start for scheduled in plan], np.int64)
        places, offsets = np.divmod(positions, block_size)
        rows = np.arange(size)
        tokens[2] = tables[rows, places].astype(np.int64) * block_size + offsets
        ones, kv_lens = (1,) * size, positions + 1
        ids, positions_, slots = self._tensor(tokens).unbind()
        return Batch(
            input_ids=ids,
            positions=positions_,
            slot_mapping=slots,
            next_tokens=tuple(map(NextToken, requests)),
            sampled=tuple(range(size)),
            sampled_rows=self._tensor(rows),
            attention=AttentionMetadata(
                query_lens=ones,
                seq_lens=tuple(kv_lens.tolist()),
                kv_lens=self._tensor(kv_lens.astype(np.int32)),
                cu_seqlens_q=self._tensor(np.arange(size + 1, dtype=np.int32)),
                block_tables=self._tensor(tables),
                block_size=block_size,
            ),
            output_lens=ones,
        )

    def _tensor(self, values: NDArray[np.int64] | NDArray[np.int32]) -> Tensor:
        return torch.from_numpy(values).to(self._device)


class BlockTables:
    """The block tables of some sequences as a matrix, padded with block 0. Only rows that have changed are written.

    Relies on what the scheduler guarantees: the list of a request's blocks only grows; a preemption replaces it.
    """

    def __init__(self) -> None:
        self._matrix = np.zeros((0, 0), np.int32)
        self._tables: list[list[int]] = []  # by row; kept, so that no other list has the same id
        self._lens: list[int] = []

    def update(self, tables: list[list[int]]) -> NDArray[np.int32]:
        """The matrix of these tables. Valid until the next call."""
        lens = [*map(len, tables)]
        width = self._matrix.shape[1]
        if max(lens) > width:
            width = max(lens) + WIDTH_STEP
        if len(tables) != len(self._tables) or width > self._matrix.shape[1] or not _are_same(tables, self._tables):
            self._rearrange(tables, width)
        for row, (length, known) in enumerate(zip(lens, self._lens, strict=True)):
            if length != known:
                self._matrix[row, known:length] = tables[row][known:]
        self._lens = lens
        return self._matrix

    def _rearrange(self, tables: list[list[int]], width: int) -> None:
        """Moves the known rows to their new places. The other rows are empty."""
        rows = {id(table): row for row, table in enumerate(self._tables)}
        sources = [rows.get(id(table), -1) for table in tables]
        matrix = np.zeros((len(tables), width), np.int32)
        kept = [row for row, source in enumerate(sources) if source >= 0]
        if kept:
            matrix[kept, : self._matrix.shape[1]] = self._matrix[[sources[row] for row in kept]]
        self._lens = [self._lens[source] if source >= 0 else 0 for source in sources]
        self._matrix, self._tables = matrix, tables


def _are_same(tables: list[list[int]], others: list[list[int]]) -> bool:
    return all(table is other for table, other in zip(tables, others, strict=True))
