"""Whole decode steps as graphs: from the input tokens to the sampled tokens, launched with one command.

A `GraphCapture` captures a step of a given size once, over buffers that stay at their addresses; replaying it computes
on whatever the buffers hold then. A step with fewer sequences than the graph's size is padded with copies of one of
them, which compute the same and write it to the same slot. The sampled tokens stay on the device, where the next step
reads them.

Only `CudaCapture`, and the waiting in `LaunchedStep`, are specific to CUDA.
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
from backend.engine.paged_model import PagedModel
from backend.engine.plan import ScheduledRequest
from backend.engine.request import Request
from backend.engine.resolved_config import ResolvedConfig
from backend.engine.sampling_batch import GREEDY_BELOW_TEMPERATURE, uniform
from backend.ops.sampling import RandomRows

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


@dataclass(frozen=True, slots=True)
class DecodeRow:
    """One request's row in a launched step."""

    request: Request
    index: int
    start: int  # position of the token that it computes
    slot: int


class LaunchedStep:
    """A step that was launched on the device. Its tokens are copied to the host as soon as they are sampled."""

    def __init__(self, rows: dict[str, DecodeRow], chosen: Tensor) -> None:
        self.rows = rows  # by request id
        is_cuda = chosen.is_cuda
        self._host = torch.empty(chosen.shape, dtype=chosen.dtype, pin_memory=is_cuda)
        self._host.copy_(chosen, non_blocking=True)
        self._done = torch.cuda.Event() if is_cuda else None  # type: ignore[no-untyped-call]
        if self._done:
            self._done.record()

    def covers(self, scheduled: ScheduledRequest, slot: int) -> bool:
        """Whether the step computes exactly this token and stores its keys and values in this slot."""
        row = self.rows.get(scheduled.request.request_id)
        if row is None or row.request is not scheduled.request or scheduled.num_tokens > 1:
            return False
        return (row.start, row.slot) == (scheduled.start, slot)

    def token_ids(self) -> list[int]:
        """The sampled tokens by row. Waits for the device."""
        if self._done:
            self._done.synchronize()
        token_ids: list[int] = self._host.tolist()
        return token_ids


class DecodeGraphs:
    """Captured decode steps for up to `max_size` sequences, and the buffers that they read."""

    def __init__(self, config: ResolvedConfig, model: PagedModel, capture: GraphCapture) -> None:
        self._model = model
        self._device = config.device
        self._block_size = config.block_size
        self._sizes = sizes_up_to(config.max_num_seqs)
        self.max_size = self._sizes[-1]
        self._rows = _RowAssignment(-(-config.max_model_len // config.block_size))

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
            for size in reversed(self._sizes)  # the largest first: the others reuse its memory
            for has_random in (False, True)
        }

    def slot(self, scheduled: ScheduledRequest) -> int:
        """The slot for the keys and values of the first scheduled token."""
        block, offset = divmod(scheduled.start, self._block_size)
        return scheduled.request.block_table[block] * self._block_size + offset

    def launch(self, plan: Sequence[ScheduledRequest], previous: LaunchedStep | None = None) -> LaunchedStep:
        """Launches a plan of one token for each of at most `max_size` requests.

        If a token is not known yet, it is the one that `previous`, the last launched step, samples for that request.
        """
        by_id = {scheduled.request.request_id: scheduled for scheduled in plan}
        ordered = [by_id[request_id] for request_id in self._rows.arrange(by_id)]
        rows = {s.request.request_id: DecodeRow(s.request, i, s.start, self.slot(s)) for i, s in enumerate(ordered)}
        size = next(size for size in self._sizes if size >= len(plan))
        padded = [*ordered, *[min(ordered, key=lambda s: s.start)] * (size - len(plan))]
        self._write_tables(padded)
        self._write_inputs(padded, rows, previous)
        has_random = self._write_noise(padded)
        self._steps[size, has_random]([scheduled.end for scheduled in padded])
        return LaunchedStep(rows, self._chosen[: len(plan)])

    def logits(self, launched: LaunchedStep, plan: Sequence[ScheduledRequest]) -> Tensor:
        """[len(plan), vocab_size] float32, of the step that was launched last."""
        return self._logits[[launched.rows[scheduled.request.request_id].index for scheduled in plan]]

    def _compute(self, size: int, has_random: bool, seq_lens: Sequence[int]) -> None:
        """The step that is captured: reads and writes buffers only."""
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
        self, padded: Sequence[ScheduledRequest], rows: dict[str, DecodeRow], previous: LaunchedStep | None
    ) -> None:
        known, sources, slots = [], [], []  # sources: the row of `previous` whose token it is; -1 if it is known
        for scheduled in padded:
            request = scheduled.request
            is_known = scheduled.start < len(request.token_ids)
            assert is_known or previous, "an unknown token needs a previous step"
            known.append(request.token_ids[scheduled.start] if is_known else 0)
            sources.append(-1 if is_known or previous is None else previous.rows[request.request_id].index)
            slots.append(rows[request.request_id].slot)
        starts = [scheduled.start for scheduled in padded]
        size = len(padded)
        uploaded = self._upload([known, sources, starts, slots])
        chosen = self._chosen[uploaded[1].clamp(min=0)]
        self._input_ids[:size].copy_(torch.where(uploaded[1] < 0, uploaded[0], chosen))
        self._positions[:size].copy_(uploaded[2])
        self._slots[:size].copy_(uploaded[3])
        self._seq_lens[:size].copy_(uploaded[2] + 1)

    def _write_noise(self, padded: Sequence[ScheduledRequest]) -> bool:
        """Writes temperatures and random numbers. Returns whether any row is sampled with a temperature."""
        temperatures = [scheduled.request.sampling.temperature for scheduled in padded]
        is_random = [temperature >= GREEDY_BELOW_TEMPERATURE for temperature in temperatures]
        if not any(is_random):
            return False
        noise = uniform([s.request.seed for s in padded], [s.end for s in padded]).tolist()
        divisors = [t if random else 1.0 for t, random in zip(temperatures, is_random, strict=True)]
        uploaded = self._upload([divisors, noise, is_random], torch.float64)
        size = len(padded)
        self._temperatures[:size].copy_(uploaded[0])
        self._uniform[:size].copy_(uploaded[1])
        self._is_random[:size].copy_(uploaded[2])
        return True

    def _write_tables(self, padded: Sequence[ScheduledRequest]) -> None:
        indexes, blocks = self._rows.changes([scheduled.request.block_table for scheduled in padded])
        if indexes:
            uploaded = self._upload([indexes, blocks])
            self._tables.view(-1).index_copy_(0, uploaded[0], uploaded[1].int())

    def _upload(self, values: Sequence[Sequence[float]], dtype: torch.dtype = torch.int64) -> Tensor:
        """Copies values to the device without waiting for it, which requires pinned memory on a GPU."""
        tensor = torch.tensor(values, dtype=dtype)
        return tensor.pin_memory().to(self._device, non_blocking=True) if self._device.type == "cuda" else tensor


class _RowAssignment:
    """Which request has which row of the buffers, and which block tables have been written there.

    A request keeps its row as long as it runs, so only the new part of its block table has to be written. A row that
    becomes free is taken by a request from the end.
    """

    def __init__(self, width: int) -> None:
        self.width = width  # of a block table, in blocks
        self._order: list[str] = []
        self._written: list[list[int]] = []

    def arrange(self, request_ids: Collection[str]) -> list[str]:
        """The same ids in the order of their rows."""
        wanted = set(request_ids)
        kept: list[str | None] = [each if each in wanted else None for each in self._order[: len(request_ids)]]
        kept += [None] * (len(request_ids) - len(kept))
        placed = set(kept)
        others = iter([each for each in request_ids if each not in placed])
        self._order = [each if each is not None else next(others) for each in kept]
        return self._order

    def changes(self, tables: Sequence[Sequence[int]]) -> tuple[list[int], list[int]]:
        """Which entries of the buffer, counted over all rows, must be written, and the blocks to write there."""
        self._written += [[] for _ in range(len(tables) - len(self._written))]
        indexes: list[int] = []
        blocks: list[int] = []
        for row, table in enumerate(tables):
            written = self._written[row]
            same = len(written) if written == table[: len(written)] else 0
            table = table[: self.width]
            indexes += range(row * self.width + same, row * self.width + len(table))
            blocks += table[same:]
            self._written[row] = [*table]
        return indexes, blocks


def _captured(capture: GraphCapture, step: DecodeStep, size: int) -> DecodeStep:
    try:
        return capture(step, size)
    except RuntimeError as error:  # how torch reports what CUDA cannot capture
        logger.warning("Decode steps of %d sequences cannot be captured as CUDA graphs and run slower: %s", size, error)
        return step
