"""Recorded decode steps on a CPU, what CUDA graphs are on a GPU.

For each number of sequences, the first decode step is recorded (backend/native/recording.py); later steps replay the
recording as one call into the kernels. Without it, a step takes about eight calls per layer, with Python in between. An
interruptible step is replayed in a few calls, with a check between them.

A program reads its inputs from the memory where they were when it was recorded, so a step's inputs are copied there
first. That is little: a few numbers per sequence. The buffer for block tables is as wide as the longest sequence may
ever need.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from backend.attention.base import AttentionMetadata
from backend.engine.batch import Batch
from backend.engine.resolved_config import ResolvedConfig
from backend.native.recording import Program, Recorder, StopCheck, raise_if_interrupted

MAX_ROWS = 64  # of a recorded step, which limits the number of programs: in larger steps, calls hardly matter

Compute = Callable[[Batch, StopCheck | None], Tensor]


class DecodePrograms:
    """Replays `compute` for batches that `fits` accepts: same arguments, and the same result bit for bit."""

    def __init__(self, config: ResolvedConfig, compute: Compute, recorder: Recorder, max_rows: int = MAX_ROWS) -> None:
        self._compute = compute
        self._recorder = recorder
        self._programs: dict[int, Program | None] = {}  # by number of rows; None: it cannot be recorded
        self._batches: dict[int, Batch] = {}  # the input buffers, by number of rows
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

    def forget(self) -> None:
        """Drops all programs, because they compute with another number of threads than wanted now."""
        self._programs.clear()

    def fits(self, attention: AttentionMetadata) -> bool:
        """Whether this is a decode step of few enough sequences, and is not known to be unrecordable."""
        rows = len(attention.query_lens)
        return rows <= self._max_rows and max(attention.query_lens) == 1 and self._programs.get(rows, True) is not None

    def __call__(self, batch: Batch, is_interrupted: StopCheck | None) -> Tensor:
        """The result is valid until the next call. Raises `StepInterrupted`, as `compute` does."""
        rows = len(batch.input_ids)
        if rows not in self._batches:
            self._batches[rows] = self._buffers(rows)
        buffers = self._batches[rows]
        _copy(batch, buffers)
        raise_if_interrupted(is_interrupted)
        if program := self._programs.get(rows):
            return program.run(is_interrupted)

        def compute(mark: Callable[[], None]) -> Tensor:
            def check() -> bool:
                mark()
                return is_interrupted is not None and is_interrupted()

            attention = replace(buffers.attention, seq_lens=batch.attention.seq_lens)
            return self._compute(replace(buffers, attention=attention), check)

        result, self._programs[rows] = self._recorder.record(compute)
        return result

    def _buffers(self, rows: int) -> Batch:
        """A batch over the first rows of all buffers."""
        ones = (1,) * rows
        starts, tables = self._starts[: rows + 1], self._tables[:rows]
        attention = AttentionMetadata(ones, ones, self._kv_lens[:rows], starts, tables, self._block_size)
        ids, positions, slots = self._tokens[:, :rows].unbind()
        return Batch(ids, positions, slots, (), (), starts[:0], attention)


def _copy(batch: Batch, to: Batch) -> None:
    """Copies the inputs by numpy; torch takes several times as long for so little data."""
    for target, source in (
        (to.input_ids, batch.input_ids),
        (to.positions, batch.positions),
        (to.slot_mapping, batch.slot_mapping),
        (to.attention.kv_lens, batch.attention.kv_lens),
    ):
        target.numpy()[:] = source.numpy()
    tables, to_tables = batch.attention.block_tables.numpy(), to.attention.block_tables.numpy()
    width = min(tables.shape[1], to_tables.shape[1])
    to_tables[:, :width] = tables[:, :width]
