"""Steps with prompts as graphs: chunks of prompts, decodes beside them, and drafts that are verified.

Without a graph, the host launches every kernel of such a step by itself, which takes longer than the device computes a
few hundred tokens. A graph is captured for some numbers of tokens. A step is padded to the next larger number by a
sequence of its own, which reads and writes a block that no request uses.

Everything that differs between steps lies in buffers: tokens, positions, slots, block tables, and lists of the decodes
and of the tiles of prompts that attention computes (`AttentionWork`). Sampling follows outside of the graph, since the
number of sampled tokens differs. Longer steps are not captured: their kernels take longer than launching them, and
the last layer then computes the sampled tokens only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from backend.attention.base import AttentionMetadata, AttentionWork
from backend.engine.batch import Batch
from backend.engine.captured_steps import CapturedSteps, DecodeStep
from backend.engine.graphs import GraphCapture, capture_or_run
from backend.engine.output_rows import find_sampled
from backend.engine.paged_model import PagedModel
from backend.engine.plan import ScheduledRequest
from backend.engine.resolved_config import ResolvedConfig
from backend.engine.step_images import has_image_tokens
from backend.engine.step_inputs import StepInputs
from backend.engine.token_arrays import NOTHING_UNKNOWN, with_sampled, write_tokens

# Tokens of the steps that can be captured. Such a step has at most half as many more tokens than it needs.
SIZES = (16, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)
NUM_BUFFERS = 2  # on the host: the device may still wait to read that of the last step
IDS, POSITIONS, SLOTS, SAMPLED = range(4)  # the rows of the buffer of numbers by token, as `write_tokens` writes them


@dataclass(frozen=True, slots=True)
class _Lists:
    """The buffers of numbers by sequence or tile, as parts of one tensor, so that one copy uploads all of them."""

    whole: Tensor  # int32
    kv_lens: Tensor  # [S]
    starts: Tensor  # [S + 1]
    decodes: Tensor  # [S]
    tiles: Tensor  # [M, 2]

    @staticmethod
    def of(whole: Tensor, max_seqs: int) -> _Lists:
        lengths = [max_seqs, max_seqs + ALIGNMENT, max_seqs, len(whole) - 3 * max_seqs - ALIGNMENT]
        kv_lens, starts, decodes, tiles = torch.split(whole, lengths)
        return _Lists(whole, kv_lens, starts[: max_seqs + 1], decodes, tiles.view(-1, 2))


ALIGNMENT = 16  # in numbers: every part begins at an address for which Triton compiles the same kernel


@dataclass(frozen=True, slots=True)
class _HostBuffers:
    """What the host writes for one step."""

    numbers: Tensor  # [4, max_tokens] int64
    lists: _Lists
    tables: Tensor  # [S, blocks] int32
    copied: torch.cuda.Event | None  # set when the device has read them; None on a CPU


class PromptGraphs:
    """Captured steps of up to `max_tokens` tokens, and the buffers that they read. Not thread-safe."""

    def __init__(self, config: ResolvedConfig, model: PagedModel, capture: GraphCapture, inputs: StepInputs) -> None:
        self._model, self._block_size, self._inputs = model, config.block_size, inputs
        sizes = [size for size in SIZES if size <= config.max_num_batched_tokens] or [SIZES[0]]
        self.max_tokens = sizes[-1]
        # The sequence of padding is one more than those of requests.
        self.max_seqs = min(config.max_num_seqs, self.max_tokens)
        num_seqs = -(-(self.max_seqs + 1) // ALIGNMENT) * ALIGNMENT
        self._num_tiles = {size: self._max_tiles(size) for size in sizes}
        self._max_model_len = config.max_model_len
        width = -(
            -max(config.max_model_len, self.max_tokens) // config.block_size
        )  # padding may be longer than a model
        device, is_cuda = config.device, config.device.type == "cuda"
        num_lists = 3 * num_seqs + ALIGNMENT + 2 * max(self._num_tiles.values())

        def zeros(*shape: int, dtype: torch.dtype, on_host: bool = False) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device="cpu" if on_host else device, pin_memory=is_cuda and on_host)

        self._numbers = zeros(4, self.max_tokens, dtype=torch.int64)
        self._lists = _Lists.of(zeros(num_lists, dtype=torch.int32).fill_(-1), num_seqs)
        self._tables = zeros(num_seqs, width, dtype=torch.int32)
        self._hosts = [
            _HostBuffers(
                zeros(4, self.max_tokens, dtype=torch.int64, on_host=True),
                _Lists.of(zeros(num_lists, dtype=torch.int32, on_host=True), num_seqs),
                zeros(num_seqs, width, dtype=torch.int32, on_host=True),
                torch.cuda.Event() if is_cuda else None,
            )
            for _ in range(NUM_BUFFERS)
        ]
        self._hidden = zeros(self.max_tokens, config.model.hidden_size, dtype=config.dtype)
        self._lens: tuple[tuple[int, ...], tuple[int, ...]] = ((1,), (1,))  # new and cached tokens of each sequence
        self._capture = capture
        self.steps = CapturedSteps("a step with prompts", sizes, self._capture_size)

    def fits(self, plan: Sequence[ScheduledRequest]) -> bool:
        """Whether there is a graph for this plan. There is none for tokens of images."""
        is_small = len(plan) <= self.max_seqs and sum(scheduled.num_tokens for scheduled in plan) <= self.max_tokens
        return is_small and not any(map(has_image_tokens, plan))

    def run(
        self, plan: Sequence[ScheduledRequest], unknown: Mapping[str, int] = NOTHING_UNKNOWN
    ) -> tuple[Batch, Tensor]:
        """Launches a plan that fits. Returns its batch and the final hidden states of all its tokens, valid until the
        next call.

        unknown: as in `make_tokens`, places in `StepInputs.tokens`.
        """
        lens = tuple(scheduled.num_tokens for scheduled in plan)
        num_tokens = sum(lens)
        size = self.steps.size_for(num_tokens)
        next_tokens, sampled, sampled_rows = find_sampled(plan, lens)
        self._write(plan, lens, size, sampled_rows, unknown)
        self.steps[size](())
        numbers = self._numbers
        batch = Batch(
            input_ids=numbers[IDS, :num_tokens],
            positions=numbers[POSITIONS, :num_tokens],
            slot_mapping=numbers[SLOTS, :num_tokens],
            next_tokens=next_tokens,
            sampled=sampled,
            sampled_rows=numbers[SAMPLED, : len(sampled)],
            attention=self._metadata(size),
            output_lens=lens,
        )
        return batch, self._hidden[:num_tokens]

    def _capture_size(self, size: int) -> DecodeStep:
        self._write((), (), size)  # padding only, which the capture may compute
        return capture_or_run(self._capture, partial(self._compute, size), size)

    def _compute(self, size: int, seq_lens: Sequence[int]) -> None:
        """The step that is captured: reads and writes buffers only."""
        numbers = self._numbers[:, :size]
        batch = Batch(
            input_ids=with_sampled(numbers[IDS], self._inputs.tokens),
            positions=numbers[POSITIONS],
            slot_mapping=numbers[SLOTS],
            next_tokens=(),
            sampled=(),
            sampled_rows=numbers[SAMPLED, :0],
            attention=self._metadata(size),
        )
        self._hidden[:size].copy_(self._model.forward(batch))

    def _metadata(self, size: int) -> AttentionMetadata:
        lists, num_seqs = self._lists, min(self.max_seqs, size) + 1
        query_lens, seq_lens = self._lens
        return AttentionMetadata(
            query_lens=query_lens,
            seq_lens=seq_lens,
            kv_lens=lists.kv_lens[:num_seqs],
            cu_seqlens_q=lists.starts[: num_seqs + 1],
            block_tables=self._tables[:num_seqs],
            block_size=self._block_size,
            work=AttentionWork(lists.decodes[: min(self.max_seqs, size)], lists.tiles[: self._num_tiles[size]], size),
        )

    def _max_tiles(self, size: int) -> int:
        """The most tiles that `size` tokens can have, of sequences that are all cut after each tile but the last."""
        return size // self._model.tile_tokens(size) + min(self.max_seqs, size) + 1

    def _write(
        self,
        plan: Sequence[ScheduledRequest],
        lens: tuple[int, ...],
        size: int,
        sampled_rows: Sequence[int] = (),
        unknown: Mapping[str, int] = NOTHING_UNKNOWN,
    ) -> None:
        """Writes a step's inputs and uploads them without waiting for it."""
        self._hosts.append(host := self._hosts.pop(0))
        if host.copied:
            host.copied.synchronize()  # the device has read what the last step but one wrote
        numbers = host.numbers.numpy()
        write_tokens(plan, self._block_size, numbers[: SLOTS + 1, : sum(lens)], unknown)
        self._write_padding(numbers, sum(lens), size)
        numbers[SAMPLED, : len(sampled_rows)] = sampled_rows
        self._write_lists(host, plan, lens, size)
        self._numbers.copy_(host.numbers, non_blocking=True)
        self._lists.whole.copy_(host.lists.whole, non_blocking=True)
        num_seqs = len(plan) + 1
        self._tables[:num_seqs].copy_(host.tables[:num_seqs], non_blocking=True)
        if host.copied:
            host.copied.record()

    def _write_padding(self, numbers: NDArray[np.int64], begin: int, size: int) -> None:
        """Writes the tokens of padding, which follow those of requests."""
        block_size = self._block_size
        padding = np.arange(size - begin)
        numbers[IDS, begin:size] = 0
        numbers[POSITIONS, begin:size] = padding % self._max_model_len
        numbers[SLOTS, begin:size] = self._model.kv.padding_block * block_size + padding % block_size

    def _write_lists(
        self, host: _HostBuffers, plan: Sequence[ScheduledRequest], lens: tuple[int, ...], size: int
    ) -> None:
        """Writes what attention reads. The sequence of padding is the last one."""
        padding = size - sum(lens)
        seq_lens = tuple(scheduled.end for scheduled in plan)
        self._lens = ((*lens, padding), (*seq_lens, padding)) if padding else (lens, seq_lens)
        query_lens, kv_lens = self._lens
        lists, count = host.lists, len(query_lens)
        lists.whole.fill_(-1)
        lists.kv_lens.numpy()[:count] = kv_lens
        lists.starts.numpy()[: count + 1] = [*accumulate(query_lens, initial=0)]
        decodes = [i for i, length in enumerate(lens) if length == 1]
        lists.decodes.numpy()[: len(decodes)] = decodes
        tile = self._model.tile_tokens(size)
        others = [(i, length) for i, length in enumerate(query_lens) if length > 1 or i == len(lens)]
        tiles = [(i, first) for i, length in others for first in range(0, length, tile)]
        if tiles:
            lists.tiles.numpy()[: len(tiles)] = tiles
        tables = host.tables.numpy()
        for row, scheduled in enumerate(plan):
            table = scheduled.request.block_table[: tables.shape[1]]
            tables[row, : len(table)] = table
        tables[len(plan)] = self._model.kv.padding_block
