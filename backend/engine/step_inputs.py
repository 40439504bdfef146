"""The inputs of a captured decode step, by row, in one buffer on the device and one copy per step.

The buffer also has the tokens that the last steps have sampled, which the next step reads there. The host writes a row
of numbers for each input into a pinned buffer, which is copied to the device without waiting. There are two pinned
buffers: while the device still reads the inputs of one step, the host writes those of the next.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

ALIGNMENT = 16  # in numbers: every input begins at an address for which Triton compiles the same kernel
NUM_BUFFERS = 2

# The rows of the buffer. The host never writes those before KNOWN. From CHOSEN to KNOWN they are adjacent, so that one
# index selects a sampled token or a known one. Steps with prompts write to two rows in turn: while the tokens of one
# are still needed, the next one is launched.
INPUT_IDS, CHOSEN, OF_PROMPTS, OF_OTHER_PROMPTS, KNOWN, SOURCES, STARTS, POSITIONS, SLOTS, TABLE_PLACES = range(10)
TABLE_BLOCKS = 10
UNIFORM, FLAGS, MASK_ROWS = range(11, 14)  # copied only if a token is not the argmax of unchanged logits
TEMPERATURE, TOP_K, TOP_P, MIN_P, PRESENCE, FREQUENCY, REPETITION = range(14, 21)  # and of those, only if they change
NUM_ROWS = 21


class StepInputs:
    """The inputs of up to `max_size` sequences.

    Those before KNOWN are outputs: INPUT_IDS are the tokens that the last step of decodes has computed, CHOSEN those
    that it has sampled, and the others those that the last two steps with prompts have sampled.
    """

    def __init__(self, max_size: int, device: torch.device) -> None:
        self.width = -(-max_size // ALIGNMENT) * ALIGNMENT
        self._device = torch.zeros((NUM_ROWS, self.width), dtype=torch.int64, device=device)
        is_cuda = device.type == "cuda"
        self._hosts = [
            torch.zeros((NUM_ROWS, self.width), dtype=torch.int64, pin_memory=is_cuda) for _ in range(NUM_BUFFERS)
        ]
        self._copied = [torch.cuda.Event() for _ in self._hosts] if is_cuda else []
        self._current = 0

    def row(self, row: int, size: int, dtype: torch.dtype = torch.int64) -> Tensor:
        """The first `size` numbers of an input on the device."""
        return self._device[row].view(dtype)[:size]

    @property
    def tokens(self) -> Tensor:
        """The rows from CHOSEN to KNOWN, one after the other: [4 * width]. SOURCES are indexes of it."""
        return self._device[CHOSEN : KNOWN + 1].view(-1)

    def place_of(self, row: int) -> int:
        """Where in `tokens` one of its rows begins."""
        return (row - CHOSEN) * self.width

    def begin(self) -> None:
        """Turns to the next pinned buffer. Waits until the device has read what it held, which usually was long ago."""
        self._current = (self._current + 1) % NUM_BUFFERS
        if self._copied:
            self._copied[self._current].synchronize()

    def write(self, row: int, values: Sequence[float] | NDArray[Any], dtype: type[np.generic] = np.int64) -> None:
        """Writes the first numbers of an input, in the pinned buffer."""
        self._hosts[self._current][row].numpy().view(dtype)[: len(values)] = values

    def upload(self, end: int) -> None:
        """Copies the inputs below `end` to the device, as they were written since `begin`."""
        self._device[KNOWN:end].copy_(self._hosts[self._current][KNOWN:end], non_blocking=True)
        if self._copied:
            self._copied[self._current].record()
