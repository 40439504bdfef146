"""Copies blocks of the prefix cache out of an engine and into it, for transfers between engines.

Blocks are named by their hashes, which cover all tokens before them, the salt and the adapter. So a block that another
engine computed is as good as one that was computed here, and a caller that can name a block knows its tokens and salt.
Methods run on the engine's thread between two steps, unless they say otherwise, and wait for nothing. A caller limits
the number of blocks per call.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

from torch import Tensor

from backend.engine.cached_block import content_of
from backend.engine.kv_memory import KvMemory
from backend.engine.request import Request
from backend.engine.scheduler import Scheduler


@dataclass(frozen=True, slots=True)
class MissingBlocks:
    """The blocks of a prompt that are not in the prefix cache: consecutive ones, up to the last that it could use."""

    first: int  # the number of the first one in the prompt
    hashes: tuple[bytes, ...]


class BlockTransfer:
    """Reads and writes blocks of the prefix cache."""

    def __init__(self, scheduler: Scheduler, kv: KvMemory) -> None:
        self._scheduler = scheduler
        self._pool = scheduler.pool
        self._kv = kv

    def find_missing(self, request: Request) -> MissingBlocks:
        """The blocks that the request would have to compute. None of them if the pool has no room for all of them."""
        hashes = self._scheduler.usable_hashes(request)
        first = len(self._pool.find_cached_prefix(hashes))
        first += self._num_saved(hashes[first:])
        has_room = len(hashes) - first <= self._pool.num_free
        return MissingBlocks(first, tuple(hashes[first:] if has_room else ()))

    def read(self, hashes: Sequence[bytes]) -> Tensor:
        """Copies of the cached blocks with these hashes, up to the first that is not cached: [n, block_bytes] uint8.

        They count as used now, so they are among the last to be evicted. Blocks in the host tier are restored first.
        """
        pool = self._pool
        cached = pool.find_cached_prefix(hashes)
        others = hashes[len(cached) :]
        pool.prepare_restore(others, background=True)
        blocks = pool.allocate(self._num_saved(others), cached, background=True)
        if blocks is None:  # no room to restore the others
            blocks = pool.allocate(0, cached, background=True) or []
        num_restored = pool.restore(blocks[len(cached) :], others)
        content = self._kv.read(blocks[: len(cached) + num_restored])
        pool.free(blocks)
        return content

    @property
    def can_read_beside_steps(self) -> bool:
        """Whether `read_beside_steps` finds all blocks. A GPU and the host tier belong to the engine's thread."""
        return self._kv.is_on_host and self._pool.tier is None

    def read_beside_steps(self, hashes: Sequence[bytes]) -> Tensor:
        """As `read`, but on any other thread while steps run, and without an effect on the order of eviction.

        A step that computes a long prompt takes much longer than the transfer of such a prompt's blocks.
        """
        versions = self._pool.versions.copy()
        blocks = self._pool.find_cached_prefix(hashes)
        content = self._kv.read(blocks)
        # A block's version changes before its content does.
        num_valid = sum(1 for _ in takewhile(lambda block: self._pool.versions[block] == versions[block], blocks))
        return content[:num_valid]

    def touch(self, hashes: Sequence[bytes]) -> None:
        """Makes the cached blocks with these hashes the last to be evicted."""
        cached = self._pool.find_cached_prefix(hashes)
        self._pool.allocate(0, cached, background=True)
        self._pool.free(cached)

    def drop(self, hashes: Sequence[bytes]) -> None:
        """Evicts the cached blocks with these hashes that no request uses: another engine has them now."""
        self._pool.drop(hashes)
        self._pool.end_step()

    def _num_saved(self, hashes: Sequence[bytes]) -> int:
        """How many of the first blocks are in the host tier."""
        tier = self._pool.tier
        return sum(1 for _ in takewhile(tier.__contains__, hashes)) if tier else 0

    def write(self, request: Request, first: int, content: Tensor) -> bool:
        """Adds blocks of the request's prompt to the cache, from number `first` on: content [n, block_bytes] uint8.

        Leaves out those that have been cached meanwhile. The request need not have been added to the engine. False if
        there is no room.
        """
        pool = self._pool
        hashes = request.block_hashes[first : first + len(content)]
        new = [i for i, block_hash in enumerate(hashes) if not pool.find_cached_prefix([block_hash])]
        blocks = pool.allocate(len(new), background=request.is_background)
        if blocks is None:
            return False
        self._kv.write(blocks, [content[i] for i in new])
        for i, block in zip(new, blocks, strict=True):
            pool.cache_block(block, content_of(request, first + i, pool.block_size))
        pool.free(blocks)
        pool.end_step()
        return True
