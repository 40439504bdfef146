"""The inputs of a captured decode step, by row, in one buffer on the device and one copy per step.

The host writes a row of numbers for each input into a pinned buffer, which is copied to the device without waiting.
There are two pinned buffers: while the device still reads the inputs of one step, the host writes those of the next.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from backend.engine.sampling_params import SamplingParams
from backend.ops.sampling import RandomRows, SamplingFilters

ALIGNMENT = 16  # in numbers: every input begins at an address for which Triton compiles the same kernel
NUM_BUFFERS = 2

# The rows of the buffer. The first two are adjacent, so that one index selects a sampled token or a known one.
CHOSEN, KNOWN, SOURCES, STARTS, SLOTS, TABLE_PLACES, TABLE_BLOCKS = range(7)
RANDOM_ROWS, FILTERED, TOP_K, TEMPERATURE, UNIFORM, TOP_P, MIN_P = range(7, 14)  # copied only if a row is random
NUM_ROWS = 14


class StepInputs:
    """The inputs of up to `max_size` sequences. CHOSEN is an output: the tokens that the last step has sampled."""

    def __init__(self, max_size: int, device: torch.device) -> None:
        self.width = -(-max_size // ALIGNMENT) * ALIGNMENT
        self._device = torch.zeros((NUM_ROWS, self.width), dtype=torch.int64, device=device)
        is_cuda = device.type == "cuda"
        self._hosts = [
            torch.zeros((NUM_ROWS, self.width), dtype=torch.int64, pin_memory=is_cuda) for _ in range(NUM_BUFFERS)
        ]
        self._copied = [torch.cuda.Event() for _ in self._hosts] if is_cuda else []  # type: ignore[no-untyped-call]
        self._current = 0

    def row(self, row: int, size: int, dtype: torch.dtype = torch.int64) -> Tensor:
        """The first `size` numbers of an input on the device."""
        return self._device[row].view(dtype)[:size]

    @property
    def tokens(self) -> Tensor:
        """CHOSEN and KNOWN, one after the other: [2 * width]. SOURCES are indexes of it."""
        return self._device[: KNOWN + 1].view(-1)

    def begin(self) -> None:
        """Turns to the next pinned buffer. Waits until the device has read what it held, which usually was long ago."""
        self._current = (self._current + 1) % NUM_BUFFERS
        if self._copied:
            self._copied[self._current].synchronize()

    def write(self, row: int, values: Sequence[float] | NDArray[Any], dtype: type[np.generic] = np.int64) -> None:
        """Writes the first numbers of an input, in the pinned buffer."""
        self._hosts[self._current][row].numpy().view(dtype)[: len(values)] = values

    def write_random(self, rows: Sequence[int], samplings: Sequence[SamplingParams], noise: NDArray[np.float64]) -> int:
        """Writes how the given rows are sampled at random. Returns how many of them have filters."""
        self.write(RANDOM_ROWS, rows)
        self.write(TEMPERATURE, [sampling.temperature for sampling in samplings], np.float32)
        self.write(UNIFORM, noise, np.float64)
        filtered = [i for i, sampling in enumerate(samplings) if sampling.has_filters]
        if filtered:
            self.write(FILTERED, filtered)
            self.write(TOP_K, [sampling.top_k or np.iinfo(np.int64).max for sampling in samplings])
            self.write(TOP_P, [sampling.top_p for sampling in samplings], np.float32)
            self.write(MIN_P, [sampling.min_p for sampling in samplings], np.float32)
        return len(filtered)

    def upload(self, *, has_random: bool) -> None:
        """Copies what was written since `begin` to the device."""
        end = NUM_ROWS if has_random else RANDOM_ROWS
        self._device[KNOWN:end].copy_(self._hosts[self._current][KNOWN:end], non_blocking=True)
        if self._copied:
            self._copied[self._current].record()

    def random_rows(self, num_random: int, num_filtered: int, vocab_size: int) -> RandomRows:
        """The uploaded sampling parameters, on the device."""
        filters = None
        if num_filtered:
            filters = SamplingFilters(
                self.row(FILTERED, num_filtered),
                self.row(TOP_K, num_random).clamp(max=vocab_size),
                self.row(TOP_P, num_random, torch.float32),
                self.row(MIN_P, num_random, torch.float32),
            )
        return RandomRows(
            self.row(RANDOM_ROWS, num_random),
            self.row(TEMPERATURE, num_random, torch.float32),
            self.row(UNIFORM, num_random, torch.float64),
            filters,
        )
