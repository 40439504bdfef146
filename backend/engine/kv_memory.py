"""The memory of the KV cache, all layers and blocks of it in one tensor; and the second tier's, in RAM or in a file."""

from __future__ import annotations

import math
import os
import zlib
from pathlib import Path
from tempfile import NamedTemporaryFile

import torch
from torch import Tensor

from backend.engine.config import ResolvedConfig
from backend.engine.errors import ConfigError
from backend.huge_pages import HugePages
from backend.kv_cache import create_kv_form
from backend.layers.step import LayerCache


class KvMemory:
    def __init__(self, config: ResolvedConfig) -> None:
        model, form = config.model, create_kv_form(config.kv_cache_dtype)
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
        shape = (num_slots, *like.shape)
        if path is None:
            self._slots = torch.empty(shape, dtype=like.dtype, pin_memory=like.is_cuda)
        else:
            self._slots = _in_a_file(path, math.prod(shape) * like.itemsize).view(like.dtype).view(shape)

    def save(self, block: int, slot: int) -> int:
        return _checksum(self._slots[slot].copy_(self._kv.block(block)))

    def load(self, slot: int, block: int, checksum: int) -> bool:
        if _checksum(self._slots[slot]) != checksum:
            return False
        self._kv.block(block).copy_(self._slots[slot])
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
