"""Decode steps on a CPU: for each number of sequences, what a model's layers do is recorded once, and is one call of
the kernels from then on (backend/native/recording.py), where it was some eight for each layer, with Python around them.
A step that somebody may give up is a few calls, between which it is asked whether it is.

A program finds its inputs where they were when it was recorded. So they are copied there first, which is little: a row
for each sequence. Block tables are as wide as the longest sequence may ever need.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from backend.attention.base import AttentionMetadata
from backend.engine.config import ResolvedConfig
from backend.native.recording import Ask, Program, Recorder, leave_if

MAX_ROWS = 64  # of a step that is recorded, and so the most programs: beyond it, calls hardly count


@dataclass(frozen=True, slots=True)
class LayerInputs:
    """What a model's layers compute with, for T tokens."""

    embedded: Tensor  # [T, hidden_size]
    rotations: tuple[tuple[Tensor, Tensor], ...]  # of each of the model's tables: cos and sin, [T, dim / 2] float32
    slot_mapping: Tensor  # [T] int64
    attention: AttentionMetadata


Layers = Callable[[LayerInputs, Ask | None], Tensor]


class DecodePrograms:
    """`layers` with the same arguments and the same result, bit for bit, for steps that suit."""

    def __init__(self, config: ResolvedConfig, layers: Layers, recorder: Recorder) -> None:
        self._layers = layers
        self._recorder = recorder
        self._programs: dict[int, Program | None] = {}  # by rows; None: it does more than can be recorded
        self._inputs: dict[int, LayerInputs] = {}  # where they are found, by rows
        self._block_size = config.block_size
        rows, model = min(config.max_num_seqs, MAX_ROWS), config.model
        self._max_rows = rows
        self._embedded = torch.zeros(rows, model.hidden_size, dtype=config.dtype)
        self._rotations = [torch.zeros(2, rows, rope.dim // 2) for rope in model.ropes]
        self._slots = torch.zeros(rows, dtype=torch.int64)
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

    def __call__(self, inputs: LayerInputs, is_given_up: Ask | None) -> Tensor:
        """The result lasts until the next call. Raises `GivenUp`, as `layers` does."""
        rows = len(inputs.embedded)
        if rows not in self._inputs:
            self._inputs[rows] = self._first(rows)
        ours = self._inputs[rows]
        _copy(inputs, ours)
        leave_if(is_given_up)
        if program := self._programs.get(rows):
            return program.run(is_given_up)

        def compute(mark: Callable[[], None]) -> Tensor:
            def asked() -> bool:
                mark()
                return is_given_up is not None and is_given_up()

            attention = replace(ours.attention, seq_lens=inputs.attention.seq_lens)
            return self._layers(replace(ours, attention=attention), asked)

        hidden, self._programs[rows] = self._recorder.record(compute)
        return hidden

    def _first(self, rows: int) -> LayerInputs:
        """The first rows of all buffers."""
        ones = (1,) * rows
        starts, tables = self._starts[: rows + 1], self._tables[:rows]
        attention = AttentionMetadata(ones, ones, self._kv_lens[:rows], starts, tables, self._block_size)
        rotations = tuple((cos[:rows], sin[:rows]) for cos, sin in self._rotations)
        return LayerInputs(self._embedded[:rows], rotations, self._slots[:rows], attention)


def _copy(inputs: LayerInputs, to: LayerInputs) -> None:
    to.embedded.copy_(inputs.embedded)
    for (to_cos, to_sin), (cos, sin) in zip(to.rotations, inputs.rotations, strict=True):
        to_cos.copy_(cos)
        to_sin.copy_(sin)
    to.slot_mapping.copy_(inputs.slot_mapping)
    to.attention.kv_lens.copy_(inputs.attention.kv_lens)
    table, to_table = inputs.attention.block_tables, to.attention.block_tables
    width = min(table.shape[1], to_table.shape[1])
    to_table[:, :width].copy_(table[:, :width])
