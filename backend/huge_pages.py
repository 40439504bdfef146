"""Allocates weights and the KV cache in huge pages, because every step reads both completely.

A CPU translates the address of every page that it reads, and its TLB caches a few thousand translations. With pages of
2 MiB, these translations cover 512 times as much memory as with pages of 4 KiB, and allocation causes a 512th of the
page faults. On most systems, Linux uses huge pages only for memory that a program marked with madvise before writing
to it. malloc and torch mark memory only if an environment variable is set.

If the system has no huge pages or refuses them, torch allocates the memory as usual.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import math
import mmap
import os
import threading
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

PAGE_BYTES = 2 << 20
PAGE_SIZE_FILE = Path("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size")
MIN_MAPPING_BYTES = 64 << 20  # size in address space; only pages that are written to take memory
ALIGNMENT = 64  # bytes; torch aligns its own tensors alike
MADV_POPULATE_WRITE = 23  # Linux 5.14
POPULATED_BYTES = 4 << 20  # per call, after the first page; other threads cannot map memory until it returns

logger = logging.getLogger(__name__)


class HugePages:
    """Arena allocator for tensors: allocates them one after the other from a mapping, so small tensors share pages.

    The memory of a deleted tensor is not reused. A mapping returns to the system when its last tensor is deleted.
    """

    def __init__(self) -> None:
        self._left = torch.empty(0, dtype=torch.uint8)  # the unused rest of the current mapping

    def zeros(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Returns a tensor of zeros. A large tensor takes memory only for the pages that are written to."""
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
        """Returns a contiguous copy of the tensor."""
        return self.zeros(tensor.shape, tensor.dtype).copy_(tensor)


def populate(tensor: Tensor) -> threading.Thread | None:
    """Takes the memory of a tensor of zeros from the system, although nothing has been written to it.

    A tensor of more than PAGE_BYTES is populated by the thread that is returned. It changes no content, so the
    tensor can be used meanwhile. If the system cannot do this, zeros are written to all of it before this returns.
    """
    begin = tensor.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
    end = _round_up(tensor.data_ptr() + tensor.nbytes, mmap.PAGESIZE)
    first = min(end, _round_up(begin + 1, PAGE_BYTES))  # shows whether the system can do this
    if _populate(begin, first):
        tensor.zero_()  # an older kernel, or another system
        return None
    if first == end:
        return None
    thread = threading.Thread(target=_populate_rest, args=(tensor, first, end), name="populate", daemon=True)
    thread.start()
    return thread


def _populate_rest(tensor: Tensor, begin: int, end: int) -> None:
    """`tensor` keeps its memory from being released meanwhile."""
    for start in range(begin, end, POPULATED_BYTES):
        if code := _populate(start, min(end, start + POPULATED_BYTES)):
            logger.warning("memory cannot be taken from the system in advance: %s", os.strerror(code))
            return


def _populate(begin: int, end: int) -> int:
    """Returns 0, or an error number. Releases the GIL meanwhile."""
    try:
        madvise = ctypes.CDLL(None, use_errno=True).madvise
    except AttributeError:
        return errno.ENOSYS
    advice = MADV_POPULATE_WRITE
    failed = madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), ctypes.c_int(advice))
    return ctypes.get_errno() if failed else 0


def _map(num_bytes: int) -> Tensor | None:
    """Returns a uint8 tensor of zeros in new huge pages, of `num_bytes` or more. None if the system refuses."""
    num_bytes = _round_up(num_bytes, PAGE_BYTES)
    try:
        # One more page leaves room to align the start, since the system may map the memory at any address.
        mapping = mmap.mmap(-1, num_bytes + PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        mapping.madvise(mmap.MADV_HUGEPAGE)
    except OSError:
        return None
    memory = torch.frombuffer(mapping, dtype=torch.uint8)  # keeps the mapping alive
    begin = -memory.data_ptr() % PAGE_BYTES
    return memory[begin : begin + num_bytes]


@cache
def _has_huge_pages() -> bool:
    """Whether the system's huge pages have PAGE_BYTES.

    On ARM with base pages of 64 KiB, huge pages have 512 MiB, which is too much memory for one write into a cache.
    """
    try:
        return int(PAGE_SIZE_FILE.read_text()) == PAGE_BYTES
    except (OSError, ValueError):
        return False


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
