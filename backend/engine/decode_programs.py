"""Decode steps on a CPU: for each number of sequences, what is computed of them is recorded once, and is one call of
the kernels from then on (backend/native/recording.py), where it was some eight for each layer, with Python around them.
A step that somebody may give up is a few calls, between which it is asked whether it is.

A program finds its inputs where they were when it was recorded. So they are copied there first, which is little: a few
numbers for each sequence. Block tables are as wide as the longest sequence may ever need.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from backend.attention.base import AttentionMetadata
from backend.engine.batch import Batch
from backend.engine.config import ResolvedConfig
from backend.native.recording import Program, Recorder, StopCheck, raise_if_interrupted

MAX_ROWS = 64  # of a step that is recorded, and so the most programs: beyond it, calls hardly count

Compute = Callable[[Batch, StopCheck | None], Tensor]


class DecodePrograms:
    """`compute` with the same arguments and the same result, bit for bit, for steps that suit."""

    def __init__(self, config: ResolvedConfig, compute: Compute, recorder: Recorder, max_rows: int = MAX_ROWS) -> None:
        self._compute = compute
        self._recorder = recorder
        self._programs: dict[int, Program | None] = {}  # by rows; None: it does more than can be recorded
        self._batches: dict[int, Batch] = {}  # where inputs are found, by rows
        self._block_size = config.block_size
        self._max_rows = rows = min(config.max_num_seqs, max_rows)
        self._tokens = torch.zeros(3, rows, dtype=torch.int64)  # ids, positions and slots
        self._kv_lens = torch.zeros(rows, dtype=torch.int32)
        self._starts = torch.arange(rows + 1, dtype=torch.int32)
        self._tables = torch.zeros(rows, -(-config.max_model_len // config.block_size), dtype=torch.int32)

    @property
    def recorded(self) -> frozenset[int]:
        """The numbers of sequences for which there is a program."""
        return frozenset(rows for rows, program in self._programs.items() if program)

    def suit(self, attention: AttentionMetadata) -> bool:
        """Whether it is a decode, of a number of sequences that can be recorded as far as is known."""
        rows = len(attention.query_lens)
        return rows <= self._max_rows and max(attention.query_lens) == 1 and self._programs.get(rows, True) is not None

    def __call__(self, batch: Batch, is_interrupted: StopCheck | None) -> Tensor:
        """The result lasts until the next call. Raises `StepInterrupted`, as `compute` does."""
        rows = len(batch.input_ids)
        if rows not in self._batches:
            self._batches[rows] = self._first(rows)
        ours = self._batches[rows]
        _copy(batch, ours)
        raise_if_interrupted(is_interrupted)
        if program := self._programs.get(rows):
            return program.run(is_interrupted)

        def compute(mark: Callable[[], None]) -> Tensor:
            def asked() -> bool:
                mark()
                return is_interrupted is not None and is_interrupted()

            attention = replace(ours.attention, seq_lens=batch.attention.seq_lens)
            return self._compute(replace(ours, attention=attention), asked)

        result, self._programs[rows] = self._recorder.record(compute)
        return result

    def _first(self, rows: int) -> Batch:
        """The first rows of all buffers."""
        ones = (1,) * rows
        starts, tables = self._starts[: rows + 1], self._tables[:rows]
        attention = AttentionMetadata(ones, ones, self._kv_lens[:rows], starts, tables, self._block_size)
        ids, positions, slots = self._tokens[:, :rows].unbind()
        return Batch(ids, positions, slots, (), (), starts[:0], attention)


def _copy(batch: Batch, to: Batch) -> None:
    """By numpy, since torch takes several times as long for so little."""
    for ours, theirs in (
        (to.input_ids, batch.input_ids),
        (to.positions, batch.positions),
        (to.slot_mapping, batch.slot_mapping),
        (to.attention.kv_lens, batch.attention.kv_lens),
    ):
        ours.numpy()[:] = theirs.numpy()
    tables, to_tables = batch.attention.block_tables.numpy(), to.attention.block_tables.numpy()
    width = min(tables.shape[1], to_tables.shape[1])
    to_tables[:, :width] = tables[:, :width]
