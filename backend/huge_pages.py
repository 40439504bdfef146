"""Memory in huge pages, for weights and the KV cache, which are read completely in every step.

A CPU translates the address of every page that it reads, and its TLB caches a few thousand translations. With pages of
2 MiB these cover 512 times as much memory as with 4 KiB, and allocating takes a 512th of the page faults. On most
systems, Linux gives huge pages only to memory that was marked with madvise before it is written to. Neither malloc nor
torch does that unless an environment variable tells them to.

If the system has no huge pages or refuses them, memory is allocated by torch as usual.
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
MIN_MAPPING_BYTES = 64 << 20  # of address space: only pages that are written to take memory
ALIGNMENT = 64  # of a tensor, in bytes, as torch aligns its own


class HugePages:
    """An arena: allocates tensors from a mapping one after the other, so that small ones share pages.

    Nothing is reused: a mapping is returned to the system when the last of its tensors is deleted.
    """

    def __init__(self) -> None:
        self._left = torch.empty(0, dtype=torch.uint8)  # the unused rest of the current mapping

    def zeros(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A tensor of zeros. A large one takes memory only for the pages that are written to."""
        num_bytes = math.prod(shape) * dtype.itemsize
        if num_bytes > len(self._left):
            mapped = _map(max(num_bytes, MIN_MAPPING_BYTES)) if _has_huge_pages() else None
            if mapped is None:
                return torch.zeros(shape, dtype=dtype)
            self._left = mapped
        allocated = self._left[:num_bytes]
        self._left = self._left[_round_up(num_bytes, ALIGNMENT) :]
        return allocated.view(dtype).view(shape)

    def copy(self, tensor: Tensor) -> Tensor:
        """A contiguous copy."""
        return self.zeros(tensor.shape, tensor.dtype).copy_(tensor)


def _map(num_bytes: int) -> Tensor | None:
    """Maps [num_bytes or more] uint8 in whole huge pages, all zeros. None if the system refuses."""
    num_bytes = _round_up(num_bytes, PAGE_BYTES)
    try:
        # One page more for alignment, since the system may map it at any address.
        mapping = mmap.mmap(-1, num_bytes + PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        mapping.madvise(mmap.MADV_HUGEPAGE)
    except OSError:
        return None
    memory = torch.frombuffer(mapping, dtype=torch.uint8)  # keeps the mapping alive
    begin = -memory.data_ptr() % PAGE_BYTES
    return memory[begin : begin + num_bytes]


@cache
def _has_huge_pages() -> bool:
    """Whether the system has huge pages of PAGE_BYTES.

    On ARM with base pages of 64 KiB, huge pages have 512 MiB: too much memory for one write into a cache.
    """
    try:
        return int(PAGE_SIZE_FILE.read_text()) == PAGE_BYTES
    except (OSError, ValueError):
        return False


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
