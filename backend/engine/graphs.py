"""Whole decode steps as graphs: one from the input tokens to the logits, and one that samples (graph_sampling.py).

A `GraphCapture` captures a step of a given size once, over buffers that stay at their addresses; replaying it computes
on whatever the buffers hold then. A step with fewer sequences than the graph's size is padded with copies of one of
them, which compute the same and write it to the same slot. The sampled tokens stay on the device, where the next step
reads them.

Only `CudaCapture`, and the waiting in launched_step.py, are specific to CUDA.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from backend.attention.base import AttentionMetadata
from backend.engine.batch import Batch
from backend.engine.captured_steps import CapturedSteps, DecodeStep
from backend.engine.graph_sampling import KINDS, GraphSampling
from backend.engine.launched_step import HostResults, LaunchedStep
from backend.engine.masks import MaskCollector
from backend.engine.paged_model import PagedModel
from backend.engine.plan import ScheduledRequest
from backend.engine.resolved_config import ResolvedConfig
from backend.engine.step_inputs import (
    CHOSEN,
    INPUT_IDS,
    KNOWN,
    NUM_ROWS,
    POSITIONS,
    SLOTS,
    SOURCES,
    STARTS,
    TABLE_BLOCKS,
    TABLE_PLACES,
    UNIFORM,
    StepInputs,
)
from backend.engine.token_arrays import NOTHING_UNKNOWN

MAX_SIZE = 256  # sequences of the largest captured step: in larger ones, launches hardly matter
SIZE_STEP = 8

logger = logging.getLogger(__name__)


def sizes_up_to(most: int) -> list[int]:
    """The sizes of steps that can be captured, ascending. The last is `most`, or `MAX_SIZE` if that is smaller."""
    most = min(most, MAX_SIZE)
    return sorted({size for size in (1, 2, 4, *range(SIZE_STEP, most, SIZE_STEP)) if size < most} | {most})


class GraphCapture(ABC):
    """Makes a replayable step of a step."""

    @property
    def is_capturing(self) -> bool:
        """Whether what is computed now becomes a part of the replayable step."""
        return False

    @abstractmethod
    def __call__(self, step: DecodeStep, size: int) -> DecodeStep:
        """A step that does what `step` does, on the content of its buffers at the time of the call. May run `step`."""


class NoCapture(GraphCapture):
    """Returns the step itself. For tests, and for devices without graphs."""

    def __call__(self, step: DecodeStep, size: int) -> DecodeStep:
        return step


class CudaCapture(GraphCapture):
    """CUDA graphs. They share one memory pool for intermediate results, since only one runs at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    @property
    def is_capturing(self) -> bool:
        return torch.cuda.is_current_stream_capturing()

    def __call__(self, step: DecodeStep, size: int) -> DecodeStep:
        seq_lens = (1,) * size
        usual = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(usual)
        with torch.cuda.stream(self._stream):
            step(seq_lens)  # compiles kernels and lets libraries allocate their memory, which a capture must not do
        usual.wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        try:
            # Other threads may use the GPU meanwhile: some steps are captured while the engine serves.
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                step(seq_lens)
        finally:
            torch.cuda.set_stream(usual)  # `torch.cuda.graph` leaves its own stream selected if a capture fails
        return lambda seq_lens: graph.replay()


class DecodeGraphs:
    """Captured decode steps for up to `max_size` sequences, and the buffers that they read."""

    def __init__(
        self,
        config: ResolvedConfig,
        model: PagedModel,
        capture: GraphCapture,
        masks: MaskCollector,
        inputs: StepInputs,
        results: HostResults,
    ) -> None:
        self._model, self._capture, self._inputs, self._results = model, capture, inputs, results
        self._block_size = config.block_size
        sizes = sizes_up_to(config.max_num_seqs)
        self.max_size = sizes[-1]
        self._rows = _RowAssignment()
        self._width = -(-config.max_model_len // config.block_size)  # of a block table

        device = config.device
        self._seq_lens = torch.ones(self.max_size, dtype=torch.int32, device=device)
        self._query_starts = torch.arange(self.max_size + 1, dtype=torch.int32, device=device)
        self._tables = torch.zeros((self.max_size, self._width), dtype=torch.int32, device=device)
        self._logits = torch.zeros((self.max_size, config.model.vocab_size), dtype=torch.float32, device=device)
        self._sampling = GraphSampling(config, model.ops, masks, self._inputs, self._logits)
        self._samples: dict[tuple[int, int], DecodeStep] = {}  # by kind of sampling and size
        self.steps = CapturedSteps("a decode step", sizes, self._capture_size)

    def fits(self, plan: Sequence[ScheduledRequest]) -> bool:
        """Whether `launch` can sample every token of a plan."""
        return self._sampling.fits(plan)

    def launch(self, plan: Sequence[ScheduledRequest], unknown: Mapping[str, int] = NOTHING_UNKNOWN) -> LaunchedStep:
        """Launches a plan of one token for each of at most `max_size` requests.

        unknown: where in `StepInputs.tokens` the last launched steps put the tokens that are not known yet, by request
        id. Waits for the masks of grammars while the model runs. Before the next step is launched, the outputs of a
        step with grammars must have been read.
        """
        rows, padded = self._arrange(plan)
        size = len(padded)
        self._inputs.begin()
        self._write_inputs(padded, unknown)
        kind, end = self._sampling.write(padded[: len(plan)], size)
        self._inputs.upload(end)
        self.steps[size]([scheduled.end for scheduled in padded])
        errors, late = self._sampling.collect_masks()
        self._samples[kind, size](())
        results = self._sampling.results(errors, late)
        chosen, place = self._inputs.row(CHOSEN, len(plan)), self._inputs.place_of(CHOSEN)
        return LaunchedStep(plan, rows, chosen, place, self._results.next(), results)

    def logits(self, plan: Sequence[ScheduledRequest]) -> Tensor:
        """The logits of a plan of known tokens, which is launched without sampling.

        Returns [N, vocab_size] float32, in the order of the plan.
        """
        rows, padded = self._arrange(plan)
        self._inputs.begin()
        self._write_inputs(padded, NOTHING_UNKNOWN)
        self._inputs.upload(UNIFORM)
        self.steps[len(padded)]([scheduled.end for scheduled in padded])
        return self._logits[rows]

    def _arrange(self, plan: Sequence[ScheduledRequest]) -> tuple[list[int], list[ScheduledRequest]]:
        """The row of each part of the plan, and the parts by row, padded to the size of a captured step."""
        rows = self._rows.arrange([scheduled.request.request_id for scheduled in plan])
        ordered: list[ScheduledRequest] = [*plan]
        for row, scheduled in zip(rows, plan, strict=True):
            ordered[row] = scheduled
        size = self.steps.size_for(len(plan))
        return rows, [*ordered, *[min(ordered, key=lambda s: s.start)] * (size - len(plan))]

    def _capture_size(self, size: int) -> DecodeStep:
        """Captures a step over padding alone, in the block that no request uses. The capture may compute it."""
        inputs, block = self._inputs, self._model.kv.padding_block
        inputs.begin()
        inputs.write(KNOWN, np.zeros(size, np.int64))
        inputs.write(SOURCES, inputs.place_of(KNOWN) + np.arange(size))
        inputs.write(STARTS, np.zeros(size, np.int64))
        inputs.write(POSITIONS, np.zeros(size, np.int64))
        inputs.write(SLOTS, np.full(size, block * self._block_size))
        inputs.write(TABLE_PLACES, np.arange(size) * self._width)
        inputs.write(TABLE_BLOCKS, np.full(size, block))
        self._sampling.write_padding(size)
        inputs.upload(NUM_ROWS)
        self._rows.forget()
        step = capture_or_run(self._capture, partial(self._compute, size), size)
        for kind in KINDS:
            self._samples[kind, size] = capture_or_run(self._capture, partial(self._sampling.compute, kind, size), size)
        return step

    def _compute(self, size: int, seq_lens: Sequence[int]) -> None:
        """The step that is captured: reads and writes buffers only."""
        inputs = self._inputs
        starts = inputs.row(STARTS, size)
        blocks = inputs.row(TABLE_BLOCKS, size).int()
        self._tables.view(-1).index_copy_(0, inputs.row(TABLE_PLACES, size), blocks)
        input_ids = inputs.row(INPUT_IDS, size)  # kept, since sampling overwrites CHOSEN and counts them
        torch.index_select(inputs.tokens, 0, inputs.row(SOURCES, size), out=input_ids)
        batch = Batch(
            input_ids=input_ids,
            positions=inputs.row(POSITIONS, size),
            slot_mapping=inputs.row(SLOTS, size),
            next_tokens=(),
            sampled=(),
            sampled_rows=starts[:0],
            attention=AttentionMetadata(
                query_lens=(1,) * size,
                seq_lens=tuple(seq_lens),
                kv_lens=torch.add(starts, 1, out=self._seq_lens[:size]),
                cu_seqlens_q=self._query_starts[: size + 1],
                block_tables=self._tables[:size],
                block_size=self._block_size,
            ),
        )
        self._model.logits(self._model.forward(batch), out=self._logits[:size])

    def _write_inputs(self, padded: Sequence[ScheduledRequest], unknown: Mapping[str, int]) -> None:
        """Writes the tokens, positions and slots, and the block of each position, which the step adds to its table."""
        block_size, of_known = self._block_size, self._inputs.place_of(KNOWN)
        known, sources, starts, positions, blocks = [], [], [], [], []
        for row, scheduled in enumerate(padded):
            request, start = scheduled.request, scheduled.start
            if start < len(request.token_ids):
                known.append(request.token_ids[start])
                sources.append(of_known + row)
            else:
                known.append(0)
                sources.append(unknown[request.request_id])
            starts.append(start)
            positions.append(start + (request.images.position_offset(start) if request.images else 0))
            blocks.append(request.block_table[start // block_size])
        places, block_ids = np.array(starts), np.array(blocks)
        indexes = places // block_size
        self._inputs.write(KNOWN, known)
        self._inputs.write(SOURCES, sources)
        self._inputs.write(STARTS, places)
        self._inputs.write(POSITIONS, positions)
        self._inputs.write(SLOTS, block_ids * block_size + places % block_size)
        self._inputs.write(TABLE_PLACES, np.arange(len(padded)) * self._width + indexes)
        self._inputs.write(TABLE_BLOCKS, block_ids)
        self._write_tables([scheduled.request.block_table for scheduled in padded], indexes.tolist())

    def _write_tables(self, tables: Sequence[list[int]], indexes: Sequence[int]) -> None:
        """Writes the block tables of rows that have got another request, up to the blocks that their steps add."""
        for row in self._rows.stale(tables, indexes):
            table = torch.tensor(tables[row][: self._width], dtype=torch.int32)
            if self._tables.is_cuda:
                table = table.pin_memory()
            self._tables[row, : len(table)].copy_(table, non_blocking=True)


class _RowAssignment:
    """Which request has which row of the buffers, and which block tables have been written there.

    A request keeps its row as long as it runs, so only the newest block of its table has to be written. A row that
    becomes free is taken by a request from the end.
    """

    def __init__(self) -> None:
        self._ids: list[str] = []  # as they were arranged last, and the row of each
        self._rows: list[int] = []
        self._order: list[str] = []  # by row
        self._tables: list[list[int]] = []  # by row: the table that was written there, and how many of its blocks
        self._written: list[int] = []

    def arrange(self, request_ids: list[str]) -> list[int]:
        """The row of each of these requests: the numbers below their count, in some order."""
        if request_ids == self._ids:
            return self._rows
        wanted = set(request_ids)
        kept: list[str | None] = [each if each in wanted else None for each in self._order[: len(request_ids)]]
        kept += [None] * (len(request_ids) - len(kept))
        placed = set(kept)
        others = iter([each for each in request_ids if each not in placed])
        self._order = [each if each is not None else next(others) for each in kept]
        row_of = {request_id: row for row, request_id in enumerate(self._order)}
        self._ids, self._rows = request_ids, [row_of[request_id] for request_id in request_ids]
        return self._rows

    def forget(self) -> None:
        """To be called when the buffers of block tables have been overwritten."""
        self._tables, self._written = [], []

    def stale(self, tables: Sequence[list[int]], indexes: Sequence[int]) -> list[int]:
        """The rows whose tables must be written whole. A step itself writes the block at its index of the table."""
        for _ in range(len(tables) - len(self._tables)):
            self._tables.append([])
            self._written.append(0)
        rows = []
        for row, (table, index) in enumerate(zip(tables, indexes, strict=True)):
            if self._tables[row] is not table or self._written[row] < index:
                self._tables[row] = table
                rows.append(row)
            self._written[row] = index + 1
        return rows


def capture_or_run(capture: GraphCapture, step: DecodeStep, size: int) -> DecodeStep:
    """The captured step, or with a warning the step itself if it cannot be captured."""
    try:
        return capture(step, size)
    except RuntimeError as error:  # how torch reports what CUDA cannot capture
        logger.warning("Steps of size %d cannot be captured as CUDA graphs and run slower: %s", size, error)
        return step
