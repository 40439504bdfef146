"""A second tier of the prefix cache: blocks that the pool gives up are kept in host memory under their hash, and come
back instead of being computed again.

Which of them to keep is decided here, on ints; `SlotStore` moves the bytes. A block stays kept when it comes back, so
that giving it up a second time copies nothing. The least recently used go first, and those that only background work
has used before all others, as in the pool.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol


class SlotStore(Protocol):
    """Memory for blocks, in slots."""

    num_slots: int

    def save(self, block: int, slot: int) -> int:
        """Copies what the pool's block holds. Returns a checksum of it."""
        ...

    def load(self, slot: int, block: int, checksum: int) -> bool:
        """Copies it back. False if it is no longer what was saved; what the block holds is undefined then."""
        ...


@dataclass(frozen=True, slots=True)
class _Kept:
    slot: int
    checksum: int


class HostTier:
    """`on_evict` hears the hash of whatever is no longer kept."""

    def __init__(self, store: SlotStore, on_evict: Callable[[bytes], None] = lambda block_hash: None) -> None:
        self.num_saved_total = 0
        self.num_restored_total = 0
        self.num_corrupted_total = 0
        self.on_evict = on_evict
        self._store = store
        self._free = list(range(store.num_slots))
        self._background: OrderedDict[bytes, _Kept] = OrderedDict()  # both in order of reuse
        self._others: OrderedDict[bytes, _Kept] = OrderedDict()

    @property
    def num_used(self) -> int:
        return len(self._background) + len(self._others)

    def __contains__(self, block_hash: bytes) -> bool:
        return block_hash in self._others or block_hash in self._background

    @property
    def num_slots(self) -> int:
        return self._store.num_slots

    def keep(self, block_hash: bytes, block: int, *, background: bool) -> bool:
        """A block of the pool is about to be overwritten. Whether its content is kept now.

        Of background work it is not kept where it would cost another its place.
        """
        kept = self._others.pop(block_hash, None) or self._background.pop(block_hash, None)
        if kept is None:
            if not self._free and not self._give_up(background):
                return False
            slot = self._free.pop()
            kept = _Kept(slot, self._store.save(block, slot))
            self.num_saved_total += 1
        (self._background if background else self._others)[block_hash] = kept
        return True

    def touch(self, block_hashes: Sequence[bytes], *, background: bool) -> None:
        """What is kept of this chain, up to the first that is not, is about to be wanted: its head the longest."""
        known = []
        for block_hash in block_hashes:
            if block_hash not in self:
                break
            known.append(block_hash)
        for block_hash in reversed(known):
            if background and block_hash in self._background:
                self._background.move_to_end(block_hash)
            elif block_hash in self._background:
                self._others[block_hash] = self._background.pop(block_hash)
            else:
                self._others.move_to_end(block_hash)

    def restore(self, block_hash: bytes, block: int) -> bool:
        """Fills a block of the pool with what is kept under this hash. False if nothing sound is."""
        kept = self._others.get(block_hash) or self._background.get(block_hash)
        if kept is None:
            return False
        if not self._store.load(kept.slot, block, kept.checksum):
            self.num_corrupted_total += 1
            self._lose(block_hash)
            return False
        self.num_restored_total += 1
        return True

    def clear(self) -> None:
        """Forgets everything, and tells nobody."""
        self._background.clear()
        self._others.clear()
        self._free = list(range(self._store.num_slots))

    def faults(self) -> Iterator[str]:
        slots = [kept.slot for kept in (*self._background.values(), *self._others.values())] + self._free
        if sorted(slots) != list(range(self._store.num_slots)):
            yield f"the host tier's {self.num_used} blocks and {len(self._free)} free slots are not its slots"
        if self._background.keys() & self._others.keys():
            yield "a block is in the host tier twice"

    def _give_up(self, background: bool) -> bool:
        victims = self._background or (None if background else self._others)
        if not victims:
            return False
        self._lose(next(iter(victims)))
        return True

    def _lose(self, block_hash: bytes) -> None:
        kept = self._others.pop(block_hash, None) or self._background.pop(block_hash)
        self._free.append(kept.slot)
        self.on_evict(block_hash)
