"""The memory of the KV cache: one tensor for all layers and blocks. And of its second tier: in RAM or in a file."""

from __future__ import annotations

import logging
import math
import os
import zlib
from collections.abc import Sequence
from pathlib import Path
from tempfile import NamedTemporaryFile

import torch
from torch import Tensor

from backend.engine.errors import ConfigError
from backend.engine.resolved_config import TRITON, ResolvedConfig
from backend.huge_pages import HugePages, populate
from backend.kv_cache import create_kv_format
from backend.layers.forward_context import LayerCache

logger = logging.getLogger(__name__)  # INFO: progress

CHUNK_BYTES = 1 << 30  # of RAM per allocation: for pinned memory, torch rounds an allocation up to a power of two


class KvMemory:
    """The KV cache of one model on its device."""

    def __init__(self, config: ResolvedConfig) -> None:
        model = config.model
        kv_format = create_kv_format(config.kv_cache_dtype, scales_apart=config.attention == TRITON)
        width = kv_format.width(model.head_dim)
        # One more block than requests can have: captured steps store the keys and values of padding there.
        self.padding_block = config.num_blocks
        shape = (model.num_cached_layers, 2, config.num_blocks + 1, config.block_size, model.num_kv_heads, width)
        dtype = kv_format.dtype(config.dtype)
        # Zeros, because attention multiplies masked values by zero, and an uninitialised NaN would survive that.
        if config.device.type == "cpu" and model.num_cached_layers:
            # The memory is taken from the system now, beside the rest of the start. If there is less than expected,
            # that shows at once and not hours later, and no request waits for a page of the cache.
            size_mib = math.prod(shape) * dtype.itemsize >> 20
            logger.info("allocating the KV cache: %d blocks of %d tokens, %d MiB", *shape[2:4], size_mib)
            self._memory = HugePages().zeros(shape, dtype)
            self._populating = populate(self._memory)
        else:
            self._memory = torch.zeros(shape, dtype=dtype, device=config.device)
            self._populating = None
        self.format = kv_format
        self.layers = [LayerCache(key, value, kv_format) for key, value in self._memory]

    def wait_until_populated(self) -> None:
        """Waits until the memory of the whole cache is taken from the system. For tests: requests need not wait."""
        if self._populating:
            self._populating.join()

    def block(self, block: int) -> Tensor:
        """A view of one block: [num_layers, 2, block_size, Hkv, W]."""
        return self._memory[:, :, block]

    @property
    def is_on_host(self) -> bool:
        return self._memory.device.type == "cpu"

    @property
    def block_bytes(self) -> int:
        return self.block(0).numel() * self._memory.itemsize

    def read(self, blocks: Sequence[int]) -> Tensor:
        """Copies of blocks on the host: [n, block_bytes] uint8, each with the bytes of `block` in its order."""
        if not blocks:
            return torch.empty((0, self.block_bytes), dtype=torch.uint8)
        return torch.stack([self.block(block) for block in blocks]).cpu().view(torch.uint8).flatten(1)

    def write(self, blocks: Sequence[int], content: Sequence[Tensor]) -> None:
        """Fills blocks with what `read` has returned for others: one row for each block, on the host."""
        for block, row in zip(blocks, content, strict=True):
            target = self.block(block)
            target.copy_(row.view(target.dtype).view(target.shape))


class HostSlots:
    """A `SlotStore`: the content of blocks as bytes on the host, in pinned memory if a GPU copies to it and from it.

    Copies between pinned memory and a GPU are queued behind the GPU's other work, so no step waits for them. Then slots
    have no checksums, since calculating one takes longer than computing the block again.

    `path`: a directory for an unnamed file that holds them instead of RAM; the page cache of the machine keeps as much
    of it in memory as there is room for. Raises `ConfigError` if there is no room for the file.
    """

    def __init__(self, kv: KvMemory, num_slots: int, path: Path | None = None) -> None:
        self.num_slots = num_slots
        self._kv = kv
        like = kv.block(0)
        self._is_queued = like.is_cuda and path is None
        if path is None:
            self._slots_per_chunk = max(1, CHUNK_BYTES // like.nbytes)
            counts = [min(self._slots_per_chunk, num_slots - i) for i in range(0, num_slots, self._slots_per_chunk)]
            self._chunks = [torch.empty((n, *like.shape), dtype=like.dtype, pin_memory=like.is_cuda) for n in counts]
        else:
            self._slots_per_chunk = num_slots
            mapped = _map_file(path, num_slots * like.nbytes)
            self._chunks = [mapped.view(like.dtype).view(num_slots, *like.shape)]

    def slot(self, slot: int) -> Tensor:
        """A view of one slot, of a block's shape."""
        chunk, index = divmod(slot, self._slots_per_chunk)
        return self._chunks[chunk][index]

    def save(self, block: int, slot: int) -> int:
        """Copies a block to a slot. Returns the slot's checksum, or 0 if slots have none."""
        if self._is_queued:
            self.slot(slot).copy_(self._kv.block(block), non_blocking=True)
            return 0
        return _checksum(self.slot(slot).copy_(self._kv.block(block)))

    def load(self, slot: int, block: int, checksum: int) -> bool:
        """Copies a slot to a block, if its checksum is still the same."""
        saved = self.slot(slot)
        if not self._is_queued and _checksum(saved) != checksum:
            return False
        self._kv.block(block).copy_(saved, non_blocking=self._is_queued)
        return True


def _map_file(folder: Path, num_bytes: int) -> Tensor:
    """[num_bytes] uint8. The file is deleted with the process, however that ends."""
    try:
        with NamedTemporaryFile(dir=folder, prefix="warmpath-kv-") as file:
            # Disk space is reserved now: otherwise a full disk would kill the process at some later write.
            os.posix_fallocate(file.fileno(), 0, num_bytes)
            return torch.from_file(file.name, shared=True, size=num_bytes, dtype=torch.uint8)
    except OSError as error:
        raise ConfigError(
            f"cannot create a file of {num_bytes} bytes in {folder}: {error.strerror}", param="kv_host_dir"
        ) from error


def _checksum(slot: Tensor) -> int:
    return zlib.crc32(slot.view(torch.uint8).numpy().data)
