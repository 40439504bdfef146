"""Fixed-size blocks of the KV cache: who holds them, in which order they are reused, and what can be found in them.

A block holds the keys and values of `block_size` consecutive tokens. It is in one of three states:

    in use         ref_count > 0, in no free list; shared by every request whose table names it
    free, cached   ref_count = 0, in a free list, and still found by its hash until it is reused
    free, blank    ref_count = 0, in the free list that is emptied before anything cached is lost

There are three free lists, emptied one after the other: blank blocks, cached ones that only background work has used,
and all other cached ones. Each is in order of reuse, least recently used first. A table is released from its tail, so
of one chain the last block goes first: a prefix without its end is still a prefix, an end without its prefix can never
be found.

Where there is a second tier (host_tier.py), what is reused goes there, and can be found until that gives it up, too.

A full block's hash covers its tokens and, through its parent's hash, everything before it; sixteen tokens alone do
not determine their keys and values, the whole prefix does. SHA-256, because the isolation between salts and the
truth of every hit rest on digest equality alone.
"""

from __future__ import annotations

import struct
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Protocol

from backend.engine.errors import IntegrityError
from backend.engine.host_tier import HostTier

ROOT_HASH = bytes(32)  # the parent of a first block


def hash_block(parent: bytes, token_ids: Sequence[int], cache_salt: str = "") -> bytes:
    """The digest of a full block: its parent's, its tokens as little-endian int32, and a first block's salt."""
    return sha256(parent + struct.pack(f"<{len(token_ids)}i", *token_ids) + cache_salt.encode()).digest()


@dataclass(frozen=True, slots=True)
class CachedBlock:
    """The content of a full block, as it is found by. The salt is that of the first block, "" in all others."""

    block_hash: bytes
    parent: bytes
    token_ids: tuple[int, ...]
    cache_salt: str = ""
    session_id: str = ""  # of the request that computed it: for listeners, and no part of its hash


class BlockListener(Protocol):
    """Hears what can be found in the cache, in the order in which it changes. Called on the engine's thread."""

    def stored(self, block: CachedBlock) -> None: ...

    def removed(self, block_hash: bytes) -> None: ...

    def cleared(self) -> None: ...

    def end_step(self) -> None:
        """What was told since the last step is one whole. Called before anybody hears of the step's outputs."""


class BlockPool:
    """Every operation takes constant time per block."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        listener: BlockListener | None = None,
        tier: HostTier | None = None,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.tier = tier
        if tier:
            tier.on_evict = self._lost
        self._listener = listener
        self._ref_counts = [0] * num_blocks
        self._hashes: list[bytes | None] = [None] * num_blocks
        self._index: dict[bytes, int] = {}
        self._background = [True] * num_blocks  # whether nothing but background work has used the content
        self._blank: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._cached_background: OrderedDict[int, None] = OrderedDict()
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._free_lists = (self._blank, self._cached_background, self._cached)

    @property
    def num_free(self) -> int:
        return sum(map(len, self._free_lists))

    @property
    def num_cached(self) -> int:
        return len(self._index)

    def find_cached_prefix(self, block_hashes: Sequence[bytes]) -> list[int]:
        """The blocks of the longest known prefix of this chain. Changes nothing, not even the order of reuse."""
        blocks: list[int] = []
        for block_hash in block_hashes:
            block = self._index.get(block_hash)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def allocate(self, num_new: int, cached: Sequence[int] = (), *, background: bool = False) -> list[int] | None:
        """Takes a reference to each block in `cached` (just matched) and `num_new` blocks with content to be written.

        All of them, in this order, or None and nothing has changed. `background`: what they hold is given up before
        anything that other work has used.
        """
        num_revived = sum(self._ref_counts[block] == 0 for block in cached)
        if num_new + num_revived > self.num_free:
            return None
        for block in cached:
            if self._ref_counts[block] == 0:
                del self._free_list_of(block)[block]
            self._ref_counts[block] += 1
            self._background[block] &= background
        return [*cached, *(self._take(background) for _ in range(num_new))]

    def prepare_restore(self, block_hashes: Sequence[bytes], *, background: bool = False) -> None:
        """These, which follow those that were matched, are about to be restored as far as the second tier has them:
        what `allocate` gives up in between takes the place of others there."""
        if self.tier:
            self.tier.touch(block_hashes, background=background)

    def restore(self, blocks: Sequence[int], block_hashes: Sequence[bytes]) -> int:
        """Fills blocks that were just allocated from the second tier, up to the first that it does not have. How many
        those are; they are known by their hashes then, if no others are."""
        num_restored = 0
        if self.tier:
            for block, block_hash in zip(blocks, block_hashes, strict=False):
                if not self.tier.restore(block_hash, block):
                    break
                if block_hash not in self._index:
                    self._index[block_hash] = block
                    self._hashes[block] = block_hash
                num_restored += 1
        return num_restored

    def cache_block(self, block: int, content: CachedBlock) -> None:
        """Makes a full, computed block in use findable. If an equal block is known already, that one stays known."""
        assert self._ref_counts[block] > 0, "only a block in use has content"
        if content.block_hash in self._index or self._hashes[block] is not None:
            return
        self._index[content.block_hash] = block
        self._hashes[block] = content.block_hash
        if self._listener and not (self.tier and content.block_hash in self.tier):
            self._listener.stored(content)

    def free(self, block_table: Sequence[int]) -> None:
        """Gives up one reference to each block of the table. What is cached stays findable until it is reused."""
        for block in reversed(block_table):
            assert self._ref_counts[block] > 0, f"block {block} is released more often than taken"
            self._ref_counts[block] -= 1
            if self._ref_counts[block] == 0:
                self._free_list_of(block)[block] = None

    def clear(self) -> None:
        """Forgets every cached block. Blocks in use stay in use, and can no longer be found."""
        self._index.clear()
        self._hashes = [None] * self.num_blocks
        for cached in (self._cached_background, self._cached):
            self._blank.update(cached)
            cached.clear()
        if self.tier:
            self.tier.clear()
        if self._listener:
            self._listener.cleared()

    def end_step(self) -> None:
        if self._listener:
            self._listener.end_step()

    def check_integrity(self) -> None:
        """Raises `IntegrityError` with every contradiction found. Fast enough to run whenever the engine goes idle."""
        if faults := list(self._faults()):
            raise IntegrityError("; ".join(faults))

    def _free_list_of(self, block: int) -> OrderedDict[int, None]:
        """Where a block is while nobody holds it."""
        if self._hashes[block] is None:
            return self._blank
        return self._cached_background if self._background[block] else self._cached

    def _take(self, background: bool) -> int:
        block, _ = next(filter(None, self._free_lists)).popitem(last=False)
        if (block_hash := self._hashes[block]) is not None:
            del self._index[block_hash]
            self._hashes[block] = None
            is_kept = self.tier is not None and self.tier.keep(block_hash, block, background=self._background[block])
            if self._listener and not is_kept:
                self._listener.removed(block_hash)
        self._ref_counts[block] = 1
        self._background[block] = background
        return block

    def _lost(self, block_hash: bytes) -> None:
        """By the second tier."""
        if self._listener and block_hash not in self._index:
            self._listener.removed(block_hash)

    def _faults(self) -> Iterator[str]:
        in_use = self.num_blocks - self._ref_counts.count(0)
        if in_use + self.num_free != self.num_blocks:
            yield f"{in_use} blocks in use and {self.num_free} free do not make {self.num_blocks}"
        if any(self._ref_counts[block] for free in self._free_lists for block in free):
            yield "a free block is in use"
        if any(self._free_list_of(block) is not free for free in self._free_lists for block in free):
            yield "a block is in a free list that is not its own"
        if min(self._ref_counts, default=0) < 0:
            yield "a reference count is negative"
        if len(self._index) != self.num_blocks - self._hashes.count(None):
            yield f"{len(self._index)} blocks in the index, {self.num_blocks - self._hashes.count(None)} with a hash"
        if list(map(self._hashes.__getitem__, self._index.values())) != list(self._index):
            yield "the index names a block that holds something else"
        if self.tier:
            yield from self.tier.faults()
