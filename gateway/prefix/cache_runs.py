"""The parts of a cache model's tree: runs of blocks, and what a lookup of a chain found.

A chain is a fingerprint: a sequence of hashes, each of which stands for its block and everything before it. Equal
hashes mean equal prefixes. A *run* is a part of chains in which no branch begins.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence

import msgspec

REPEATED_SHARE = 0.75  # of the blocks that only one prompt has: what repeats it has at least so many of them


class Run:
    """Consecutive blocks of a chain without a branch.

    `last_used` is the model's clock at their last use. The first `settled_blocks` were certainly computed: `settled` is
    the clock when the last call that used them ended.
    """

    __slots__ = ("blocks", "children", "is_cached", "is_gone", "last_used", "parent", "settled", "settled_blocks")

    def __init__(self, parent: Run | None, blocks: array[int], last_used: int) -> None:
        self.parent = parent
        self.blocks = blocks  # hashes of 64 bits; as objects they would take six times as much memory
        self.children: dict[int, Run] = {}  # by their first block
        self.last_used = last_used
        self.settled = 0
        self.settled_blocks = 0
        self.is_cached = True  # False: evicted, and only remembered
        self.is_gone = False  # evicted, whatever the capacity is


Walk = tuple[list[Run], int, int]
"""A chain's path through the tree: its runs, how many of the chain's blocks they cover, and how many blocks of the last
run belong to the chain if not all of them do (else 0)."""


class CachePrediction(msgspec.Struct, frozen=True, gc=False):
    """What the model predicted for a chain at one moment. All lengths are in blocks.

    The first `matched` blocks are predicted to be cached. The blocks from there to `remembered` are evicted, unless the
    capacity is larger than the model assumes. Those from there to `known` have been cached, but are gone, or were
    cached behind some that are.
    `ages` has entries for each run on the chain's path: where the run, or its settled part, ends in the chain, and its
    `settled`, which is 0 for blocks that may not be computed yet. `version` is the model's version: while it is
    unchanged, the prediction and its `walk` are current.

    `reused` has, for each run, how many uses of the model ago it was last used, and how many of its blocks the chain
    has.
    """

    matched: int
    remembered: int
    ages: tuple[tuple[int, int], ...]
    version: int
    walk: Walk | None = None
    reused: tuple[tuple[int, int], ...] = ()
    known: int = 0

    @property
    def repeats_prompt(self) -> bool:
        """Whether the chain repeats one known prompt, or most of it, since clients edit ends. Nothing of it is evicted.

        Then it is a conversation's next turn, or the same prompt again. What several conversations have in common has
        branches behind it.
        """
        if not self.walk or not self.walk[0] or self.matched < self.known:
            return False
        path, _, cut = self.walk
        return not path[-1].children and (not cut or cut >= REPEATED_SHARE * len(path[-1].blocks))

    @property
    def own_part(self) -> int | None:
        """Where the part of the chain begins that only one known prompt has, if the chain continues all of that prompt.

        A block may be missing at its end, which was not full then. None if nothing is known to belong to it alone.
        """
        if not self.walk or not self.walk[0] or self.matched < self.known:
            return None
        path, depth, cut = self.walk
        length = len(path[-1].blocks)
        return None if path[-1].children or 0 < cut < length - 1 else depth - (cut or length)


class KnownBlocks(msgspec.Struct, frozen=True, gc=False):
    """Blocks of a prompt that the model knew when it was sent: what its response reports the cache's capacity.

    `distance` is their reuse distance in blocks (`block_ages.py`), `last_used` the model's clock at their last use.
    `is_lost`: an earlier response showed that they are gone, for whatever reason, so to miss them tells nothing.
    """

    blocks: int
    distance: int
    is_lost: bool
    last_used: int = 0


def known_parts(walk: Walk, distance_of: Callable[[int], int], lost_until: int) -> tuple[KnownBlocks, ...]:
    """The blocks on a chain's path that have certainly been computed, run by run, up to the first that may not be.

    `distance_of` has the reuse distance of what was last used at a clock. What was used until `lost_until` is lost.
    """
    path, depth, _ = walk
    parts: list[KnownBlocks] = []
    end, last_used, same_use, distance = 0, -1, 0, 0
    for run in path:
        if run.is_gone:
            break
        if run.last_used != last_used:
            last_used, same_use, distance = run.last_used, 0, distance_of(run.last_used)
        length, settled = len(run.blocks), run.settled_blocks
        if length > depth - end:
            length = depth - end
        certain = length if length < settled else settled
        if certain:  # of blocks that were used together, an engine evicts the end first
            parts.append(KnownBlocks(certain, distance + same_use, last_used <= lost_until, last_used))
        if certain < length:
            break
        end, same_use = end + length, same_use + length
    return tuple(parts)


def shared_blocks(one: Sequence[int], other: Sequence[int], start: int = 0) -> int:
    """How many leading blocks `one` has in common with `other` from `start` on.

    By bisection, because each hash stands for all before it.
    """
    low, high = 0, min(len(one), len(other) - start)
    while low < high:
        middle = (low + high + 1) // 2
        if one[middle - 1] == other[start + middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low
