"""Fixed-size blocks of the KV cache: reference counts, the order of eviction, and lookup by hash.

A block holds the keys and values of `block_size` consecutive tokens. It is in one of three states:

    in use          ref_count > 0, in no free list; shared by every request whose block_table contains it
    free, cached    ref_count = 0, in a free list; found by its hash until it is evicted
    free, uncached  ref_count = 0, in the free list that is used up first

There are three free lists, used up in this order: uncached blocks, cached blocks that only background work has used,
all other cached blocks. Each is ordered by last use, least recently used first. A block_table is freed from its end,
so the last block of a prefix is evicted first. This is deliberate: a prefix without its end is still useful, but an
end without its prefix can never be found.

With a second tier (host_tier.py), evicted blocks move to host memory and can be found there until it evicts them, too.

Minimal path 5 of 9. Next: batch.py.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence

from backend.engine.cached_block import BlockListener, CachedBlock
from backend.engine.errors import IntegrityError
from backend.engine.host_tier import HostTier


class BlockPool:
    """All blocks of one KV cache. Every operation takes constant time per block. Not thread-safe."""

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
            tier.on_evict = self._on_host_eviction
        self._listener = listener
        self._ref_counts = [0] * num_blocks
        self._hashes: list[bytes | None] = [None] * num_blocks
        self.versions = [0] * num_blocks  # how often each was taken for new content (block_transfer.py)
        self._index: dict[bytes, int] = {}  # block by hash
        self._background = [True] * num_blocks  # whether only background work has used the content
        self._uncached: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._cached_background: OrderedDict[int, None] = OrderedDict()
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._free_lists = (self._uncached, self._cached_background, self._cached)

    @property
    def num_free(self) -> int:
        """Free blocks, cached or not."""
        return sum(map(len, self._free_lists))

    @property
    def num_cached(self) -> int:
        """Blocks that can be found by their hash, free or in use."""
        return len(self._index)

    def find_cached_prefix(self, block_hashes: Sequence[bytes]) -> list[int]:
        """The blocks of the longest cached prefix of this chain. Changes nothing, not even the order of eviction."""
        blocks: list[int] = []
        for block_hash in block_hashes:
            block = self._index.get(block_hash)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def allocate(self, num_new: int, cached: Sequence[int] = (), *, background: bool = False) -> list[int] | None:
        """Takes a reference to each block in `cached` (just found) and to `num_new` blocks that are to be written.

        Returns all of them in this order, or None if there are too few free blocks; nothing has changed then. New ones
        are in the order of memory, in which attention reads them up to a fifth faster.
        `background`: their content may be evicted before anything that other work has used.
        """
        num_revived = sum(self._ref_counts[block] == 0 for block in cached)
        if num_new + num_revived > self.num_free:
            return None
        for block in cached:
            if self._ref_counts[block] == 0:
                del self._free_list_of(block)[block]
            self._ref_counts[block] += 1
            self._background[block] &= background
        return [*cached, *sorted(self._take_free_block(background) for _ in range(num_new))]

    def cache_block(self, block: int, content: CachedBlock) -> None:
        """Makes a full, computed block in use findable. If an equal block is cached already, that one stays cached."""
        assert self._ref_counts[block] > 0, "only a block in use has content"
        if content.block_hash in self._index or self._hashes[block] is not None:
            return
        self._index[content.block_hash] = block
        self._hashes[block] = content.block_hash
        if self._listener and not (self.tier and content.block_hash in self.tier):
            self._listener.stored(content)

    def free(self, block_table: Sequence[int]) -> None:
        """Drops one reference to each block of the table. Cached content stays findable until it is evicted."""
        for block in reversed(block_table):
            assert self._ref_counts[block] > 0, f"block {block} is freed more often than allocated"
            self._ref_counts[block] -= 1
            if self._ref_counts[block] == 0:
                self._free_list_of(block)[block] = None

    def drop(self, block_hashes: Sequence[bytes]) -> None:
        """Evicts the blocks with these hashes now, as far as they are free."""
        for block_hash in reversed(block_hashes):
            block = self._index.get(block_hash)
            if block is not None and self._ref_counts[block] == 0:
                del self._free_list_of(block)[block]
                self._evict(block, block_hash)
                self._uncached[block] = None

    def clear(self) -> None:
        """Drops the whole prefix cache. Blocks in use stay in use, but can no longer be found."""
        self._index.clear()
        self._hashes = [None] * self.num_blocks
        for cached in (self._cached_background, self._cached):
            self._uncached.update(cached)
            cached.clear()
        if self.tier:
            self.tier.clear()
        if self._listener:
            self._listener.cleared()

    def end_step(self) -> None:
        """Tells the listener that the events of one step are complete."""
        if self._listener:
            self._listener.end_step()

    def _free_list_of(self, block: int) -> OrderedDict[int, None]:
        """The list that a block belongs to when it is free."""
        if self._hashes[block] is None:
            return self._uncached
        return self._cached_background if self._background[block] else self._cached

    def _take_free_block(self, background: bool) -> int:
        """Takes the first block of the first free list that has any, and evicts what it caches."""
        block, _ = next(filter(None, self._free_lists)).popitem(last=False)
        if (block_hash := self._hashes[block]) is not None:
            self._evict(block, block_hash)
        self.versions[block] += 1
        self._ref_counts[block] = 1
        self._background[block] = background
        return block

    def _evict(self, block: int, block_hash: bytes) -> None:
        """A free block is found no longer, except in the second tier."""
        del self._index[block_hash]
        self._hashes[block] = None
        is_saved = self.tier is not None and self.tier.save(block_hash, block, background=self._background[block])
        if self._listener and not is_saved:
            self._listener.removed(block_hash)

    # -- Optional: the second tier (host_tier.py). Skip on a first reading. -------------------------------------------

    def prepare_restore(self, block_hashes: Sequence[bytes], *, background: bool = False) -> None:
        """Announces that `restore` will be called for these hashes, which follow those that were found.

        `allocate` evicts blocks to the second tier in between. Marking these as recently used there keeps them.
        """
        if self.tier:
            self.tier.touch(block_hashes, background=background)

    def restore(self, blocks: Sequence[int], block_hashes: Sequence[bytes]) -> int:
        """Fills newly allocated blocks from the second tier, up to the first hash that it does not have.

        Returns how many were filled. They are cached under their hashes, unless another block already is.
        """
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

    def _on_host_eviction(self, block_hash: bytes) -> None:
        if self._listener and block_hash not in self._index:
            self._listener.removed(block_hash)

    # -- Optional: the self-check. Skip on a first reading. ------------------------------------------------------------

    def check_integrity(self) -> None:
        """Raises `IntegrityError` naming every inconsistency. Fast enough to run whenever the engine becomes idle."""
        if faults := list(self._find_faults()):
            raise IntegrityError("; ".join(faults))

    def _find_faults(self) -> Iterator[str]:
        in_use = self.num_blocks - self._ref_counts.count(0)
        if in_use + self.num_free != self.num_blocks:
            yield f"{in_use} blocks in use and {self.num_free} free do not add up to {self.num_blocks}"
        if any(self._ref_counts[block] for free in self._free_lists for block in free):
            yield "a block in a free list is in use"
        if any(self._free_list_of(block) is not free for free in self._free_lists for block in free):
            yield "a block is in the wrong free list"
        if min(self._ref_counts, default=0) < 0:
            yield "a reference count is negative"
        if len(self._index) != self.num_blocks - self._hashes.count(None):
            yield f"{len(self._index)} blocks in the index, {self.num_blocks - self._hashes.count(None)} with a hash"
        if list(map(self._hashes.__getitem__, self._index.values())) != list(self._index):
            yield "the index maps a hash to a block with other content"
        if self.tier:
            yield from self.tier.find_faults()
