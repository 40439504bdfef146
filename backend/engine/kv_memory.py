"""The memory of the KV cache, all layers and blocks of it in one tensor; and the second tier's, in RAM or in a file."""

from __future__ import annotations

import os
import zlib
from pathlib import Path
from tempfile import NamedTemporaryFile

import torch
from torch import Tensor

from backend.engine.config import ResolvedConfig
from backend.engine.errors import ConfigError
from backend.huge_pages import HugePages
from backend.kv_cache import create_kv_format
from backend.layers.forward_context import LayerCache

PART_BYTES = 1 << 30  # of RAM that is asked for at once: torch takes a power of two, where it pins any


class KvMemory:
    def __init__(self, config: ResolvedConfig) -> None:
        model, form = config.model, create_kv_format(config.kv_cache_dtype)
        width = form.width(model.head_dim)
        shape = (model.num_layers, 2, config.num_blocks, config.block_size, model.num_kv_heads, width)
        dtype = form.dtype(config.dtype)
        # Zeros, since attention multiplies masked values by zero and an uninitialised NaN would survive that.
        if config.device.type == "cpu":
            # Written to at once, which takes all of it from the system: where there is less than was thought, that
            # shows now and not in the middle of a request, and no request waits for a page of the cache.
            self._memory = HugePages().zeros(shape, dtype).zero_()
        else:
            self._memory = torch.zeros(shape, dtype=dtype, device=config.device)
        self.form = form
        self.layers = [LayerCache(key, value, form) for key, value in self._memory]

    def block(self, block: int) -> Tensor:
        """[num_layers, 2, block_size, Hkv, W], and no copy."""
        return self._memory[:, :, block]


class HostSlots:
    """A `SlotStore`: what a block holds, as bytes on the host. Pinned where a GPU copies to it and from it.

    `path`: a folder for a file, without a name, that holds them instead of RAM; the machine's page cache keeps as much
    of it near as there is room for. Raises `ConfigError` if there is no room for the file.
    """

    def __init__(self, kv: KvMemory, num_slots: int, path: Path | None = None) -> None:
        self.num_slots = num_slots
        self._kv = kv
        like = kv.block(0)
        if path is None:
            self._part_slots = max(1, PART_BYTES // like.nbytes)
            counts = [min(self._part_slots, num_slots - first) for first in range(0, num_slots, self._part_slots)]
            self._parts = [torch.empty((n, *like.shape), dtype=like.dtype, pin_memory=like.is_cuda) for n in counts]
        else:
            self._part_slots = num_slots
            held = _in_a_file(path, num_slots * like.nbytes)
            self._parts = [held.view(like.dtype).view(num_slots, *like.shape)]

    def slot(self, slot: int) -> Tensor:
        """Like a block, and no copy."""
        part, place = divmod(slot, self._part_slots)
        return self._parts[part][place]

    def save(self, block: int, slot: int) -> int:
        return _checksum(self.slot(slot).copy_(self._kv.block(block)))

    def load(self, slot: int, block: int, checksum: int) -> bool:
        held = self.slot(slot)
        if _checksum(held) != checksum:
            return False
        self._kv.block(block).copy_(held)
        return True


def _in_a_file(folder: Path, num_bytes: int) -> Tensor:
    """[num_bytes] uint8. The file ends with the process, however that ends."""
    try:
        with NamedTemporaryFile(dir=folder, prefix="warmpath-kv-") as file:
            # Room is taken now: without it, a full disk would kill the process at some later write.
            os.posix_fallocate(file.fileno(), 0, num_bytes)
            return torch.from_file(file.name, shared=True, size=num_bytes, dtype=torch.uint8)
    except OSError as error:
        raise ConfigError(f"no file of {num_bytes} bytes in {folder}: {error.strerror}", param="kv_host_dir") from error


def _checksum(slot: Tensor) -> int:
    return zlib.crc32(slot.view(torch.uint8).numpy().data)
