"""Whole decode steps as graphs: one from the input tokens to the logits, and one that samples (graph_sampling.py).

A `GraphCapture` captures a step of a given size once, over buffers that stay at their addresses; replaying it computes
on whatever the buffers hold then. A step with fewer sequences than the graph's size is padded with copies of one of
them, which compute the same and write it to the same slot. The sampled tokens stay on the device, where the next step
reads them.

Only `CudaCapture`, and the waiting in `LaunchedStep`, are specific to CUDA.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from backend.attention.base import AttentionMetadata
from backend.engine.batch import Batch
from backend.engine.graph_sampling import KINDS, GraphSampling, StepResults
from backend.engine.masks import MaskCollector
from backend.engine.paged_model import PagedModel
from backend.engine.plan import RunnerOutput, ScheduledRequest
from backend.engine.resolved_config import ResolvedConfig
from backend.engine.step_inputs import (
    CHOSEN,
    INPUT_IDS,
    KNOWN,
    SLOTS,
    SOURCES,
    STARTS,
    TABLE_BLOCKS,
    TABLE_PLACES,
    UNIFORM,
    StepInputs,
)

MAX_SIZE = 256  # sequences of the largest captured step: in larger ones, launches hardly matter
SIZE_STEP = 8

logger = logging.getLogger(__name__)

# Takes the lengths of the step's sequences. A captured step ignores them and reads them on the device.
DecodeStep = Callable[[Sequence[int]], None]


def sizes_up_to(most: int) -> list[int]:
    """The sizes of the captured steps, ascending. The last is `most`, or `MAX_SIZE` if that is smaller."""
    most = min(most, MAX_SIZE)
    return sorted({size for size in (1, 2, 4, *range(SIZE_STEP, most, SIZE_STEP)) if size < most} | {most})


class GraphCapture(ABC):
    """Makes a replayable step of a step."""

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
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, step: DecodeStep, size: int) -> DecodeStep:
        seq_lens = (1,) * size
        usual = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(usual)
        with torch.cuda.stream(self._stream):
            step(seq_lens)  # compiles kernels and lets libraries allocate their memory, which a capture must not do
        usual.wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
                step(seq_lens)
        finally:
            torch.cuda.set_stream(usual)  # `torch.cuda.graph` leaves its own stream selected if a capture fails
        return lambda seq_lens: graph.replay()


class LaunchedStep:
    """A step that was launched on the device. Its tokens are copied to `host` as soon as they are sampled.

    `rows`: the row of each part of the plan. `results`: what there is besides tokens. `host` and the memory of
    `results` are not written again before `outputs` has read them.
    """

    def __init__(
        self,
        plan: Sequence[ScheduledRequest],
        rows: Sequence[int],
        chosen: Tensor,
        host: Tensor,
        results: StepResults | None = None,
    ) -> None:
        self.requests = [scheduled.request for scheduled in plan]
        self.starts = [scheduled.start for scheduled in plan]  # the position of the token that each part computes
        self.tables = [request.block_table for request in self.requests]  # these lists grow, but never change otherwise
        self.rows = rows
        self._results = results
        self._host = host[: len(chosen)]
        self._host.copy_(chosen, non_blocking=True)
        self._done = torch.cuda.Event() if chosen.is_cuda else None  # type: ignore[no-untyped-call]
        if self._done:
            self._done.record()

    def places(self) -> dict[str, int]:
        """The place of each request in the plan that was launched, by request id."""
        return {request.request_id: place for place, request in enumerate(self.requests)}

    def covers(self, scheduled: ScheduledRequest, place: int | None) -> bool:
        """Whether the step computes exactly this token, at this place, and stores its keys and values in its slot."""
        if place is None or scheduled.num_tokens > 1:
            return False
        request = scheduled.request
        return (
            self.requests[place] is request
            and self.starts[place] == scheduled.start
            and self.tables[place] is request.block_table  # otherwise it was preempted and resumed in other blocks
        )

    def computes(self, plan: Sequence[ScheduledRequest]) -> bool:
        """Whether the step computes exactly this plan, in its order."""
        return len(plan) == len(self.requests) and all(
            self.covers(scheduled, place) for place, scheduled in enumerate(plan)
        )

    def outputs(self) -> list[RunnerOutput]:
        """The sampled tokens, in the order of the plan that was launched. Waits for the device."""
        if self._done:
            self._done.synchronize()
        found: list[int] = self._host.tolist()
        token_ids = [found[row] for row in self.rows]
        if self._results:
            return self._results.outputs(token_ids, self.rows)
        return [RunnerOutput((token_id,)) for token_id in token_ids]


class DecodeGraphs:
    """Captured decode steps for up to `max_size` sequences, and the buffers that they read."""

    def __init__(self, config: ResolvedConfig, model: PagedModel, capture: GraphCapture, masks: MaskCollector) -> None:
        self._model = model
        self._block_size = config.block_size
        self._sizes = sizes_up_to(config.max_num_seqs)
        self.max_size = self._sizes[-1]
        self._rows = _RowAssignment()
        self._inputs = StepInputs(self.max_size, config.device)
        self._width = -(-config.max_model_len // config.block_size)  # of a block table

        device = config.device
        self._seq_lens = torch.ones(self.max_size, dtype=torch.int32, device=device)
        self._query_starts = torch.arange(self.max_size + 1, dtype=torch.int32, device=device)
        self._tables = torch.zeros((self.max_size, self._width), dtype=torch.int32, device=device)
        self._logits = torch.zeros((self.max_size, config.model.vocab_size), dtype=torch.float32, device=device)
        self._sampling = GraphSampling(config, model.ops, masks, self._inputs, self._logits)
        # Two: the tokens of one step are read after the next one was launched.
        self._results = [
            torch.zeros(self.max_size, dtype=torch.int64, pin_memory=device.type == "cuda") for _ in range(2)
        ]
        self._steps = {
            size: capture_or_run(capture, partial(self._compute, size), size)
            for size in reversed(self._sizes)  # the largest first: the others reuse its memory
        }
        self._samples = {
            (kind, size): capture_or_run(capture, partial(self._sampling.compute, kind, size), size)
            for size in reversed(self._sizes)
            for kind in KINDS
        }

    def fits(self, plan: Sequence[ScheduledRequest]) -> bool:
        """Whether `launch` can sample every token of a plan."""
        return self._sampling.fits(plan)

    def launch(self, plan: Sequence[ScheduledRequest], previous: LaunchedStep | None = None) -> LaunchedStep:
        """Launches a plan of one token for each of at most `max_size` requests.

        If a token is not known yet, it is the one that `previous`, the last launched step, samples for that request.
        Waits for the masks of grammars while the model runs. Before the next step is launched, the outputs of a step
        with grammars must have been read.
        """
        rows, padded = self._arrange(plan)
        size = len(padded)
        self._inputs.begin()
        self._write_inputs(padded, previous)
        kind, end = self._sampling.write(padded[: len(plan)], size)
        self._inputs.upload(end)
        self._steps[size]([scheduled.end for scheduled in padded])
        errors, late = self._sampling.collect_masks()
        self._samples[kind, size](())
        results = self._sampling.results(errors, late)
        self._results.reverse()
        return LaunchedStep(plan, rows, self._inputs.row(CHOSEN, len(plan)), self._results[0], results)

    def logits(self, plan: Sequence[ScheduledRequest]) -> Tensor:
        """The logits of a plan of known tokens, which is launched without sampling.

        Returns [N, vocab_size] float32, in the order of the plan.
        """
        rows, padded = self._arrange(plan)
        self._inputs.begin()
        self._write_inputs(padded, None)
        self._inputs.upload(UNIFORM)
        self._steps[len(padded)]([scheduled.end for scheduled in padded])
        return self._logits[rows]

    def _arrange(self, plan: Sequence[ScheduledRequest]) -> tuple[list[int], list[ScheduledRequest]]:
        """The row of each part of the plan, and the parts by row, padded to the size of a captured step."""
        rows = self._rows.arrange([scheduled.request.request_id for scheduled in plan])
        ordered: list[ScheduledRequest] = [*plan]
        for row, scheduled in zip(rows, plan, strict=True):
            ordered[row] = scheduled
        size = next(size for size in self._sizes if size >= len(plan))
        return rows, [*ordered, *[min(ordered, key=lambda s: s.start)] * (size - len(plan))]

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
            positions=starts,
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

    def _write_inputs(self, padded: Sequence[ScheduledRequest], previous: LaunchedStep | None) -> None:
        """Writes the tokens, positions and slots, and the block of each position, which the step adds to its table."""
        block_size, width = self._block_size, self._inputs.width
        places = previous.places() if previous else {}
        known, sources, starts, blocks = [], [], [], []
        for row, scheduled in enumerate(padded):
            request, start = scheduled.request, scheduled.start
            if start < len(request.token_ids):
                known.append(request.token_ids[start])
                sources.append(width + row)
            else:
                assert previous, "an unknown token needs a previous step"
                known.append(0)
                sources.append(previous.rows[places[request.request_id]])
            starts.append(start)
            blocks.append(request.block_table[start // block_size])
        positions, block_ids = np.array(starts), np.array(blocks)
        indexes = positions // block_size
        self._inputs.write(KNOWN, known)
        self._inputs.write(SOURCES, sources)
        self._inputs.write(STARTS, positions)
        self._inputs.write(SLOTS, block_ids * block_size + positions % block_size)
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
