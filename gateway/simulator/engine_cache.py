"""The KV cache of a simulated engine: which blocks are findable, which are in use, and what is evicted next.

A chain is a sequence of block hashes, each of which stands for its block and everything before it. The findable blocks
form a tree, stored as *runs*: consecutive blocks of a chain without a branch. So a lookup takes as many steps as the
prompt has branches, not blocks.

A running request pins the runs on its path, and holds *private* blocks for tokens that are not computed yet, or that do
not fill a block. A pinned block is never evicted. When the last request that uses a run ends, the run is the most
recently used one. A request's path is released from its end, so the end of a prefix is evicted before its beginning.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Protocol


class EngineCacheListener(Protocol):
    """Learns of every change to the set of findable blocks, in order."""

    def stored(self, hashes: Sequence[int], parent: int | None, session: str) -> None: ...

    def removed(self, hashes: Sequence[int]) -> None: ...


class CachedRun:
    """Findable blocks that follow each other without a branch. `pins` counts the requests whose path includes them."""

    __slots__ = ("blocks", "children", "parent", "pins")

    def __init__(self, parent: CachedRun | None, blocks: list[int]) -> None:
        self.parent = parent
        self.blocks = blocks
        self.children: dict[int, CachedRun] = {}  # by their first block
        self.pins = 0


class BlockTable:
    """The blocks of one running request: a path in the tree, and private blocks behind it."""

    __slots__ = ("depth", "private", "tip")

    def __init__(self, tip: CachedRun, depth: int, private: int) -> None:
        self.tip = tip  # the last run of the path
        self.depth = depth  # length of the path in blocks
        self.private = private

    def __len__(self) -> int:
        return self.depth + self.private


class EngineCache:
    """All blocks of one KV cache, or of one that several engines share. Lengths are in blocks."""

    def __init__(self, capacity: int, listener: EngineCacheListener | None = None) -> None:
        self.capacity = capacity
        self.findable = 0
        self.pinned = 0  # findable blocks that running requests use
        self.private = 0  # blocks of running requests that are not findable
        self._listener = listener
        self._root = CachedRun(None, [])
        self._unpinned: OrderedDict[CachedRun, None] = OrderedDict()  # least recently used first

    @property
    def available(self) -> int:
        """Blocks that can be allocated: those that hold nothing, and those that can be evicted."""
        return self.capacity - self.pinned - self.private

    def match(self, chain: Sequence[int]) -> int:
        """How many leading blocks of the chain are findable. Changes nothing."""
        return self._find(chain)[1]

    def match_unused(self, chain: Sequence[int]) -> tuple[int, int]:
        """Like `match`, and how many of these blocks no running request uses."""
        _, depth, _, unused = self._find(chain)
        return depth, unused

    def allocate(self, chain: Sequence[int], num_blocks: int) -> BlockTable | None:
        """Blocks for a request: the findable ones of `chain`, and private ones up to `num_blocks` in all.

        None, without a change, if there are too few.
        """
        tip, depth, common, unused = self._find(chain)
        if num_blocks - depth + unused > self.available:
            return None
        if common < len(tip.blocks):
            tip = self._split(tip, common)
        self._pin(tip)
        table = BlockTable(tip, depth, 0)
        self.grow(table, num_blocks - depth)
        return table

    def grow(self, table: BlockTable, num_blocks: int) -> None:
        """Add private blocks, which must be available. Evicts as many as necessary.

        A cache that several engines share may exceed its capacity for a moment, since they plan their steps alone.
        """
        self._evict(self.findable + self.private + num_blocks - self.capacity)
        self.private += num_blocks
        table.private += num_blocks

    def publish(self, table: BlockTable, chain: Sequence[int], session: str = "") -> None:
        """Private blocks behind the path have been computed: make them findable as the rest of `chain`.

        If equal blocks are findable already, the request continues with those, and its own are free.
        """
        while table.depth < len(chain):
            tip, start = table.tip, table.depth
            child = tip.children.get(chain[start])
            if child is None:
                self._append(table, list(chain[start:]), session)
                return
            common = _common_blocks(child.blocks, chain, start)
            if common < len(child.blocks):
                child = self._split(child, common)
            if not child.pins:
                del self._unpinned[child]
                self.pinned += common
            child.pins += 1
            table.tip, table.depth = child, start + common
            table.private -= common
            self.private -= common

    def free(self, table: BlockTable) -> None:
        """The request has ended or was preempted. Findable blocks remain findable until they are evicted."""
        self.private -= table.private
        run = table.tip
        while run.parent is not None:
            run.pins -= 1
            if not run.pins:
                self._unpinned[run] = None
                self.pinned -= len(run.blocks)
            run = run.parent
        table.tip, table.depth, table.private = self._root, 0, 0

    def drop(self, chain: Sequence[int], kept: int) -> None:
        """Evict the end of a chain, from block `kept` on, as far as no request uses it and nothing continues it."""
        tip, depth, common, _ = self._find(chain)
        depth += len(tip.blocks) - common
        while depth > kept and not tip.pins and not tip.children and tip.parent is not None:
            parent, count = tip.parent, min(len(tip.blocks), depth - kept)
            removed = tip.blocks[-count:]
            if count == len(tip.blocks):
                del self._unpinned[tip]
                del parent.children[tip.blocks[0]]
            else:
                del tip.blocks[-count:]
            depth -= count
            self.findable -= count
            if self._listener is not None:
                self._listener.removed(removed[::-1])
            tip = parent

    def clear(self) -> None:
        """Evict everything that no request uses."""
        self._evict(self.findable)

    def _find(self, chain: Sequence[int]) -> tuple[CachedRun, int, int, int]:
        """The last run on the chain's path, the path's length, and how many of that run's blocks belong to it.

        Also how many blocks of the path no request uses.
        """
        run, depth, common, unused = self._root, 0, 0, 0
        while depth < len(chain) and (child := run.children.get(chain[depth])) is not None:
            common = _common_blocks(child.blocks, chain, depth)
            depth += common
            unused += 0 if child.pins else common
            run = child
            if common < len(child.blocks):
                break
        return run, depth, common, unused

    def _split(self, run: CachedRun, length: int) -> CachedRun:
        """Cut a run after `length` blocks, and return its first part. `run` itself becomes the rest."""
        assert run.parent is not None
        head = CachedRun(run.parent, run.blocks[:length])
        head.pins = run.pins
        run.parent.children[head.blocks[0]] = head
        run.parent = head
        del run.blocks[:length]
        head.children[run.blocks[0]] = run
        if not head.pins:  # the caller pins it at once, so its place in the order does not matter
            self._unpinned[head] = None
        return head

    def _pin(self, tip: CachedRun) -> None:
        run = tip
        while run.parent is not None:
            if not run.pins:
                del self._unpinned[run]
                self.pinned += len(run.blocks)
            run.pins += 1
            run = run.parent

    def _append(self, table: BlockTable, blocks: list[int], session: str) -> None:
        tip = table.tip
        parent = tip.blocks[-1] if tip.blocks else None
        if tip.pins == 1 and not tip.children:  # no other request uses it; the root has no pins
            tip.blocks += blocks
        else:
            run = tip.children[blocks[0]] = CachedRun(tip, blocks)
            run.pins = 1
            table.tip = run
        count = len(blocks)
        table.depth += count
        table.private -= count
        self.private -= count
        self.pinned += count
        self.findable += count
        if self._listener is not None:
            self._listener.stored(blocks, parent, session)

    def _evict(self, count: int) -> None:
        while count > 0 and self._unpinned:
            run = next(iter(self._unpinned))
            assert run.parent is not None and not run.children
            removed = run.blocks[-count:]
            if len(removed) == len(run.blocks):
                del self._unpinned[run]
                del run.parent.children[run.blocks[0]]
            else:
                del run.blocks[-count:]
            count -= len(removed)
            self.findable -= len(removed)
            if self._listener is not None:
                self._listener.removed(removed[::-1])


def _common_blocks(blocks: list[int], chain: Sequence[int], start: int) -> int:
    """How many blocks of a run the chain contains from `start` on. The first one is known to be equal.

    By bisection, because each hash stands for all blocks before it.
    """
    low, high = 1, min(len(blocks), len(chain) - start)
    while low < high:
        middle = (low + high + 1) // 2
        if chain[start + middle - 1] == blocks[middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low
