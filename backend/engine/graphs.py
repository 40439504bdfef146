"""Whole decode steps, from the tokens to the tokens behind them, each of which a device does at one command.

A step of so many sequences is captured once, by a `Capture`, over buffers that stay where they are, and done again with
whatever they hold then. Steps have sizes: one with fewer sequences is filled up with repetitions of one of them, which
compute the same and write it to the same place. What they chose stays on the device, where the next step takes it from.

Nothing here is about CUDA but `CudaCapture` and the waiting in `LaunchedStep`.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from backend.attention.base import AttentionMetadata
from backend.engine.batch import Batch
from backend.engine.config import ResolvedConfig
from backend.engine.paged_model import PagedModel
from backend.engine.plan import ScheduledRequest
from backend.engine.request import Request
from backend.engine.sampling_batch import GREEDY_BELOW_TEMPERATURE, uniform
from backend.ops.sampling import RandomRows

MAX_SIZE = 256  # sequences of the largest step that is captured: beyond it, launches hardly count
SIZE_STEP = 8

logger = logging.getLogger(__name__)

Step = Callable[[Sequence[int]], None]  # is told how long its sequences are, which a captured one reads on the device


def sizes_up_to(most: int) -> list[int]:
    """Of the steps that are captured. The last is `most`, as far as `MAX_SIZE` allows."""
    most = min(most, MAX_SIZE)
    return sorted({size for size in (1, 2, 4, *range(SIZE_STEP, most, SIZE_STEP)) if size < most} | {most})


class Capture(ABC):
    @abstractmethod
    def __call__(self, step: Step, size: int) -> Step:
        """What does the same as `step` on what its buffers hold when it is called. `step` may run meanwhile."""


class NoCapture(Capture):
    """The step itself."""

    def __call__(self, step: Step, size: int) -> Step:
        return step


class CudaCapture(Capture):
    """CUDA graphs, which share the memory for what is computed in between, since one runs at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, step: Step, size: int) -> Step:
        seq_lens = (1,) * size
        usual = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(usual)
        with torch.cuda.stream(self._stream):
            step(seq_lens)  # kernels are compiled, and libraries take their memory
        usual.wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
                step(seq_lens)
        finally:
            torch.cuda.set_stream(usual)  # `torch.cuda.graph` leaves its own where a capture can not be ended
        return lambda seq_lens: graph.replay()


@dataclass(frozen=True, slots=True)
class Row:
    request: Request
    index: int
    start: int  # the token that it computes
    slot: int


class LaunchedStep:
    """A step that the device has been told to do."""

    def __init__(self, rows: dict[str, Row], chosen: Tensor) -> None:
        self.rows = rows  # by the request's id
        is_cuda = chosen.is_cuda
        self._host = torch.empty(chosen.shape, dtype=chosen.dtype, pin_memory=is_cuda)
        self._host.copy_(chosen, non_blocking=True)
        self._done = torch.cuda.Event() if is_cuda else None  # type: ignore[no-untyped-call]
        if self._done:
            self._done.record()

    def covers(self, scheduled: ScheduledRequest, slot: int) -> bool:
        """Whether it computes just that, and writes it just there."""
        row = self.rows.get(scheduled.request.request_id)
        if row is None or row.request is not scheduled.request or scheduled.num_tokens > 1:
            return False
        return (row.start, row.slot) == (scheduled.start, slot)

    def token_ids(self) -> list[int]:
        """By row. Waits for the device."""
        if self._done:
            self._done.synchronize()
        token_ids: list[int] = self._host.tolist()
        return token_ids


class DecodeGraphs:
    """Steps of one token each, for up to `max_size` sequences."""

    def __init__(self, config: ResolvedConfig, model: PagedModel, capture: Capture) -> None:
        self._model = model
        self._device = config.device
        self._block_size = config.block_size
        self._sizes = sizes_up_to(config.max_num_seqs)
        self.max_size = self._sizes[-1]
        self._rows = _Rows(-(-config.max_model_len // config.block_size))

        def buffer(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=config.device)

        self._input_ids, self._positions, self._slots = buffer(3, self.max_size)
        self._seq_lens = buffer(self.max_size, dtype=torch.int32) + 1
        self._starts = torch.arange(self.max_size + 1, dtype=torch.int32, device=config.device)
        self._all_rows = torch.arange(self.max_size, device=config.device)
        self._tables = buffer(self.max_size, self._rows.width, dtype=torch.int32)
        self._temperatures = buffer(self.max_size, dtype=torch.float32) + 1.0
        self._uniform = buffer(self.max_size, dtype=torch.float64)
        self._is_random = buffer(self.max_size, dtype=torch.bool)
        self._chosen = buffer(self.max_size)
        self._logits = buffer(self.max_size, config.model.vocab_size, dtype=torch.float32)
        self._steps = {
            (size, has_random): _captured(capture, partial(self._compute, size, has_random), size)
            for size in reversed(self._sizes)  # the largest first, in whose memory the others find room
            for has_random in (False, True)
        }

    def slot(self, scheduled: ScheduledRequest) -> int:
        """Where the keys and values of its first token go."""
        block, offset = divmod(scheduled.start, self._block_size)
        return scheduled.request.block_table[block] * self._block_size + offset

    def launch(self, plan: Sequence[ScheduledRequest], previous: LaunchedStep | None = None) -> LaunchedStep:
        """Does a plan of one token each, at most `max_size`. Tokens that are not known yet are those that `previous`,
        launched last, has chosen for the same requests."""
        by_id = {scheduled.request.request_id: scheduled for scheduled in plan}
        ordered = [by_id[request_id] for request_id in self._rows.arrange(by_id)]
        rows = {s.request.request_id: Row(s.request, i, s.start, self.slot(s)) for i, s in enumerate(ordered)}
        size = next(size for size in self._sizes if size >= len(plan))
        filled = [*ordered, *[min(ordered, key=lambda s: s.start)] * (size - len(plan))]
        self._write_tables(filled)
        self._write_inputs(filled, rows, previous)
        has_random = self._write_noise(filled)
        self._steps[size, has_random]([scheduled.end for scheduled in filled])
        return LaunchedStep(rows, self._chosen[: len(plan)])

    def logits(self, launched: LaunchedStep, plan: Sequence[ScheduledRequest]) -> Tensor:
        """[len(plan), vocab_size] float32, of the step that was launched last."""
        return self._logits[[launched.rows[scheduled.request.request_id].index for scheduled in plan]]

    def _compute(self, size: int, has_random: bool, seq_lens: Sequence[int]) -> None:
        batch = Batch(
            input_ids=self._input_ids[:size],
            positions=self._positions[:size],
            slot_mapping=self._slots[:size],
            next_tokens=(),
            sampled=(),
            sampled_rows=self._starts[:0],
            attention=AttentionMetadata(
                query_lens=(1,) * size,
                seq_lens=tuple(seq_lens),
                kv_lens=self._seq_lens[:size],
                cu_seqlens_q=self._starts[: size + 1],
                block_tables=self._tables[:size],
                block_size=self._block_size,
            ),
        )
        logits = self._model.logits(self._model.forward(batch))
        chosen = logits.argmax(dim=-1)
        if has_random:
            random = RandomRows(self._all_rows[:size], self._temperatures[:size], self._uniform[:size], None)
            chosen = torch.where(self._is_random[:size], self._model.ops.draw(logits, random), chosen)
        self._logits[:size].copy_(logits)
        self._chosen[:size].copy_(chosen)

    def _write_inputs(
        self, filled: Sequence[ScheduledRequest], rows: dict[str, Row], previous: LaunchedStep | None
    ) -> None:
        known, sources, slots = [], [], []
        for scheduled in filled:
            request = scheduled.request
            is_known = scheduled.start < len(request.token_ids)
            assert is_known or previous, "a token that nobody knows"
            known.append(request.token_ids[scheduled.start] if is_known else 0)
            sources.append(-1 if is_known or previous is None else previous.rows[request.request_id].index)
            slots.append(rows[request.request_id].slot)
        starts = [scheduled.start for scheduled in filled]
        size = len(filled)
        given = self._upload([known, sources, starts, slots])
        chosen = self._chosen[given[1].clamp(min=0)]
        self._input_ids[:size].copy_(torch.where(given[1] < 0, given[0], chosen))
        self._positions[:size].copy_(given[2])
        self._slots[:size].copy_(given[3])
        self._seq_lens[:size].copy_(given[2] + 1)

    def _write_noise(self, filled: Sequence[ScheduledRequest]) -> bool:
        """Whether any row is drawn."""
        temperatures = [scheduled.request.sampling.temperature for scheduled in filled]
        is_random = [temperature >= GREEDY_BELOW_TEMPERATURE for temperature in temperatures]
        if not any(is_random):
            return False
        noise = uniform([s.request.seed for s in filled], [s.end for s in filled]).tolist()
        used = [t if random else 1.0 for t, random in zip(temperatures, is_random, strict=True)]
        given = self._upload([used, noise, is_random], torch.float64)
        size = len(filled)
        self._temperatures[:size].copy_(given[0])
        self._uniform[:size].copy_(given[1])
        self._is_random[:size].copy_(given[2])
        return True

    def _write_tables(self, filled: Sequence[ScheduledRequest]) -> None:
        places, blocks = self._rows.changes([scheduled.request.block_table for scheduled in filled])
        if places:
            given = self._upload([places, blocks])
            self._tables.view(-1).index_copy_(0, given[0], given[1].int())

    def _upload(self, values: Sequence[Sequence[float]], dtype: torch.dtype = torch.int64) -> Tensor:
        """Without waiting for what the device is doing: memory that a device reads by itself must not move."""
        given = torch.tensor(values, dtype=dtype)
        return given.pin_memory().to(self._device, non_blocking=True) if self._device.type == "cuda" else given


class _Rows:
    """Who has which row of the buffers, and what stands there of block tables.

    A request keeps its row while it goes on, so that of a table only what is new has to be written; a row that has
    become empty is taken by one from the end.
    """

    def __init__(self, width: int) -> None:
        self.width = width  # of a table, in blocks
        self._order: list[str] = []
        self._written: list[list[int]] = []

    def arrange(self, request_ids: Collection[str]) -> list[str]:
        """The same, in the order of their rows."""
        wanted = set(request_ids)
        kept: list[str | None] = [each if each in wanted else None for each in self._order[: len(request_ids)]]
        kept += [None] * (len(request_ids) - len(kept))
        standing = set(kept)
        others = iter([each for each in request_ids if each not in standing])
        self._order = [each if each is not None else next(others) for each in kept]
        return self._order

    def changes(self, tables: Sequence[Sequence[int]]) -> tuple[list[int], list[int]]:
        """Places, counted over all rows, where blocks are to be written, and these blocks."""
        self._written += [[] for _ in range(len(tables) - len(self._written))]
        places: list[int] = []
        blocks: list[int] = []
        for row, table in enumerate(tables):
            written = self._written[row]
            same = len(written) if written == table[: len(written)] else 0
            table = table[: self.width]
            places += range(row * self.width + same, row * self.width + len(table))
            blocks += table[same:]
            self._written[row] = [*table]
        return places, blocks


def _captured(capture: Capture, step: Step, size: int) -> Step:
    try:
        return capture(step, size)
    except RuntimeError as error:  # what CUDA says of what it can not capture
        logger.warning("steps of %d sequences are not captured, and take longer: %s", size, error)
        return step
