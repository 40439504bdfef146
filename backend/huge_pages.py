"""Memory in huge pages, for weights and caches, which are read as a whole in every step.

Before a CPU reads from a page it looks up where that lies, and it remembers some thousands of pages: those of 2 MiB
reach 512 times as far as those of 4 KiB, and are taken from the system with a 512th of the faults. Linux, on most
systems, gives them only to memory that was named by madvise before it is written to. Neither malloc nor torch does that
unless an environment variable tells them.

Where there are none, or the system refuses, memory is torch's own.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

PAGE_BYTES = 2 << 20
PAGE_SIZE_FILE = Path("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size")
MIN_MAPPING_BYTES = 64 << 20  # of which only what is written to takes memory
ALIGNMENT = 64  # of a tensor, in bytes: torch's own


class HugePages:
    """Hands out a mapping from its beginning to its end, so that small tensors share pages, and takes nothing back: a
    mapping goes back to the system with the last of its tensors."""

    def __init__(self) -> None:
        self._left = torch.empty(0, dtype=torch.uint8)  # of the mapping that is handed out

    def zeros(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A large one takes no memory before it is written to, and then no more than the pages that are."""
        num_bytes = math.prod(shape) * dtype.itemsize
        if num_bytes > len(self._left):
            mapped = _map(max(num_bytes, MIN_MAPPING_BYTES)) if _has_huge_pages() else None
            if mapped is None:
                return torch.zeros(shape, dtype=dtype)
            self._left = mapped
        given = self._left[:num_bytes]
        self._left = self._left[_round_up(num_bytes, ALIGNMENT) :]
        return given.view(dtype).view(shape)

    def copy(self, tensor: Tensor) -> Tensor:
        """A contiguous one."""
        return self.zeros(tensor.shape, tensor.dtype).copy_(tensor)


def _map(num_bytes: int) -> Tensor | None:
    """[num_bytes or more] uint8 in whole pages, all zeros; None if the system refuses."""
    num_bytes = _round_up(num_bytes, PAGE_BYTES)
    try:
        # A page more, since the system may place it anywhere.
        mapping = mmap.mmap(-1, num_bytes + PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        mapping.madvise(mmap.MADV_HUGEPAGE)
    except OSError:
        return None
    memory = torch.frombuffer(mapping, dtype=torch.uint8)  # which keeps the mapping
    begin = -memory.data_ptr() % PAGE_BYTES
    return memory[begin : begin + num_bytes]


@cache
def _has_huge_pages() -> bool:
    """Whether there are any, and of this size. On ARM with pages of 64 KiB they have 512 MiB: too much to take for one
    write into a cache."""
    try:
        return int(PAGE_SIZE_FILE.read_text()) == PAGE_BYTES
    except (OSError, ValueError):
        return False


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
