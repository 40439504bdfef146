"""A second tier of the prefix cache: evicted blocks are kept in host memory under their hash and restored from there.

Restoring a block replaces computing it again. This module decides which blocks to keep, on ints; a `SlotStore` moves
the bytes. A block stays in the tier when it is restored, so evicting it again copies nothing. Eviction order is as in
the pool: blocks that only background work has used go first, and then the least recently used.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol


class SlotStore(Protocol):
    """Host memory for blocks, divided into slots."""

    num_slots: int

    def save(self, block: int, slot: int) -> int:
        """Copies the content of a block of the pool to a slot. Returns a checksum."""
        ...

    def load(self, slot: int, block: int, checksum: int) -> bool:
        """Copies a slot back to a block. False if the checksum differs; the block's content is undefined then."""
        ...


@dataclass(frozen=True, slots=True)
class _SavedBlock:
    slot: int
    checksum: int


class HostTier:
    """Blocks in host memory, found by their hash. `on_evict` is called with the hash of each block that is dropped."""

    def __init__(self, store: SlotStore, on_evict: Callable[[bytes], None] = lambda block_hash: None) -> None:
        self.num_saved_total = 0
        self.num_restored_total = 0
        self.num_corrupted_total = 0
        self.on_evict = on_evict
        self._store = store
        self._free_slots = list(range(store.num_slots))
        # Both in order of eviction: blocks that only background work has used, and all others.
        self._background: OrderedDict[bytes, _SavedBlock] = OrderedDict()
        self._foreground: OrderedDict[bytes, _SavedBlock] = OrderedDict()

    @property
    def num_used(self) -> int:
        return len(self._background) + len(self._foreground)

    def __contains__(self, block_hash: bytes) -> bool:
        return block_hash in self._foreground or block_hash in self._background

    @property
    def num_slots(self) -> int:
        return self._store.num_slots

    def save(self, block_hash: bytes, block: int, *, background: bool) -> bool:
        """Saves a block that the pool is about to overwrite. Returns whether the tier holds its content afterwards.

        A background block is not saved if it would evict a foreground one.
        """
        saved = self._foreground.pop(block_hash, None) or self._background.pop(block_hash, None)
        if saved is None:
            if not self._free_slots and not self._make_room(background):
                return False
            slot = self._free_slots.pop()
            saved = _SavedBlock(slot, self._store.save(block, slot))
            self.num_saved_total += 1
        (self._background if background else self._foreground)[block_hash] = saved
        return True

    def touch(self, block_hashes: Sequence[bytes], *, background: bool) -> None:
        """Marks the saved prefix of this chain as recently used, its head as the most recent."""
        known = []
        for block_hash in block_hashes:
            if block_hash not in self:
                break
            known.append(block_hash)
        for block_hash in reversed(known):
            if background and block_hash in self._background:
                self._background.move_to_end(block_hash)
            elif block_hash in self._background:
                self._foreground[block_hash] = self._background.pop(block_hash)
            else:
                self._foreground.move_to_end(block_hash)

    def restore(self, block_hash: bytes, block: int) -> bool:
        """Fills a block of the pool with the content saved under this hash. False if there is none or it is corrupt."""
        saved = self._foreground.get(block_hash) or self._background.get(block_hash)
        if saved is None:
            return False
        if not self._store.load(saved.slot, block, saved.checksum):
            self.num_corrupted_total += 1
            self._evict(block_hash)
            return False
        self.num_restored_total += 1
        return True

    def clear(self) -> None:
        """Drops everything without calling `on_evict`."""
        self._background.clear()
        self._foreground.clear()
        self._free_slots = list(range(self._store.num_slots))

    def find_faults(self) -> Iterator[str]:
        """Inconsistencies, for the pool's integrity check."""
        saved = (*self._background.values(), *self._foreground.values())
        slots = [each.slot for each in saved] + self._free_slots
        if sorted(slots) != list(range(self._store.num_slots)):
            yield f"the host tier's {self.num_used} blocks and {len(self._free_slots)} free slots are not its slots"
        if self._background.keys() & self._foreground.keys():
            yield "a block is in the host tier twice"

    def _make_room(self, background: bool) -> bool:
        """Evicts one block for a new one. False if there is none that may be evicted."""
        victims = self._background or (None if background else self._foreground)
        if not victims:
            return False
        self._evict(next(iter(victims)))
        return True

    def _evict(self, block_hash: bytes) -> None:
        saved = self._foreground.pop(block_hash, None) or self._background.pop(block_hash)
        self._free_slots.append(saved.slot)
        self.on_evict(block_hash)
