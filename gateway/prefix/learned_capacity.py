"""Learns a cache's capacity from what responses found in it: the capacity that would have predicted them best.

A cache that evicts the least recently used blocks still has a block if its capacity exceeds the block's reuse distance
(`block_ages.py`). So each response shows, for every capacity, how many blocks a model with that capacity would have
mispredicted. The errors are added up on a ladder of capacities, as shares of each response's known blocks, and older
ones count less. The capacity with the least error is the estimate.

This converges within a few responses, since each of them speaks about all capacities at once. And it is stable: where
responses contradict each other, because other clients use the engine or because it evicts in a slightly different
order, the estimate lies where the fewest are wrong. The policy's guess counts as one response, the error of which grows
by `GUESS_ERROR` with each step of the ladder away from it, up to `GUESS_ERROR_MAX`.

If blocks were used together, engines evict the last of them first. So a response that finds only some of them shows the
capacity almost exactly. For this, such blocks are divided into `PIECES`. Nothing but a full cache does this (a restart
loses all of them), so the first response that certainly did ends the policy's guess.

What was found of several prompts together is taken to be what was used last: the pieces are sorted over all of them.

Deployments that the policy describes as equal share what they see (`CapacityGroup`), which counts like
`GROUP_RESPONSES` of their own.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate

STEP = 1.05  # between two capacities of the ladder
CAPACITY_MAX_BLOCKS = 1_000_000  # 64M tokens
CLASSES = math.ceil(math.log(CAPACITY_MAX_BLOCKS, STEP)) + 1
KEPT = 0.99  # of the earlier responses' weight, with each response
WEIGHT_MAX = 1e6  # above it, the errors are scaled back, so that they stay exact
GUESS_ERROR = 0.05
GUESS_ERROR_MAX = 2.0
GROUP_RESPONSES = 20.0
RECOMPUTED_EVERY = 8  # responses
PIECES, PIECE_MIN_BLOCKS = 4, 4  # of blocks that were used together: at most so many, of at least so many blocks
_LADDER = [STEP**step for step in range(CLASSES)]

Part = tuple[float, int]
"""Blocks of a prompt that were used together: their reuse distance in blocks, and how many they are."""
Piece = tuple[float, float]
"""A few blocks of a part: the least capacity at which they are cached, and what they count."""


class CapacityErrors:
    """Decayed prediction errors by capacity."""

    def __init__(self) -> None:
        # Instead of decaying all earlier errors, each response weighs more than the one before it.
        self._weight = 1.0
        self._changes = [0.0] * CLASSES  # of the error, from the capacity before it on the ladder

    def add(self, changes: Iterable[tuple[int, float]]) -> None:
        """A response: at which steps of the ladder its error changes, and by how much."""
        self._weight /= KEPT
        if self._weight > WEIGHT_MAX:
            self._changes = [change / self._weight for change in self._changes]
            self._weight = 1.0
        for step, change in changes:
            self._changes[step] += self._weight * change

    def changes(self) -> Sequence[float]:
        """In units of the newest response."""
        return [change / self._weight for change in self._changes]


class CapacityGroup:
    """What deployments that the policy describes as equal have seen."""

    def __init__(self) -> None:
        self.errors = CapacityErrors()


class LearnedCapacity:
    """The capacity of one cache, in blocks. Owned by the event loop."""

    def __init__(self, guess_blocks: int) -> None:
        """`guess_blocks` is the policy's."""
        self.blocks = guess_blocks
        self.group: CapacityGroup | None = None
        self._guess = guess_blocks
        guess = _step(guess_blocks)
        self._guess_changes = [_guess_change(step, guess) for step in range(CLASSES)]
        self._guess_weight = 1.0  # of these, in units of the newest response; 0 once the guess has ended
        self._errors = CapacityErrors()
        self._since = 0  # responses since the capacity was computed

    def note(
        self, pieces: Sequence[Piece], found: float, *, responses: int = 1, is_surprise: bool, ends_guess: bool = False
    ) -> bool:
        """So many responses found so much of these pieces cached. True if the estimate changed.

        `is_surprise`: it was predicted otherwise, so the estimate is computed at once. `ends_guess`: nothing but a
        full cache explains what was found.
        """
        total = sum(weight for _, weight in pieces)
        if total <= 0:
            return False
        found, before = min(max(0.0, found), total), 0.0
        changes: list[tuple[int, float]] = []
        for distance, weight in sorted(pieces):  # a larger capacity finds the next one, too
            change = abs(found - before - weight) - abs(found - before)
            changes.append((_step(distance), responses * change / total))
            before += weight
        self._errors.add(changes)
        self._guess_weight = 0.0 if ends_guess else KEPT * self._guess_weight
        if self.group is not None:
            self.group.errors.add(changes)
        self._since += 1
        if not is_surprise and self._since < RECOMPUTED_EVERY:
            return False
        self._since = 0
        blocks_before, self.blocks = self.blocks, self._best()
        return self.blocks != blocks_before

    def _best(self) -> int:
        """The capacity with the least error."""
        changes = self._errors.changes()
        if self.group is not None:
            share = GROUP_RESPONSES * (1 - KEPT)
            changes = [own + share * all_ for own, all_ in zip(changes, self.group.errors.changes(), strict=True)]
        if weight := self._guess_weight:
            changes = [change + weight * guess for change, guess in zip(changes, self._guess_changes, strict=True)]
        errors = list(accumulate(changes))
        best = errors.index(min(errors))
        return self._guess if best == _step(self._guess) else round(_LADDER[best])


def pieces_of(distance: float, blocks: int) -> Iterator[tuple[float, float, float]]:
    """A part's pieces: the distance at which each ends on average, its first block's place in the part, and its length.

    A cache that has no room for all blocks of the part has evicted the last ones.
    """
    length, start = max(blocks / PIECES, PIECE_MIN_BLOCKS), 0.0
    while start < blocks:
        in_piece = min(length, blocks - start)
        yield distance + start + in_piece / 2, start, in_piece
        start += in_piece


def is_cut(parts: Iterable[Part], found: float) -> bool:
    """Whether blocks that were used together were found only in part: not if all are lost, as by a restart."""
    end = 0.0
    for _, blocks in parts:
        if end < found < end + blocks:
            return True
        end += blocks
    return False


def _guess_change(step: int, guess: int) -> float:
    """How the guess' error changes from the step before: it grows with the distance, up to `GUESS_ERROR_MAX`."""
    if abs(2 * (step - guess) - 1) >= 2 * GUESS_ERROR_MAX / GUESS_ERROR:
        return 0.0
    return GUESS_ERROR if step > guess else -GUESS_ERROR


def _step(blocks: float) -> int:
    """The first step of the ladder with at least so many blocks."""
    return min(max(0, math.ceil(math.log(max(1.0, blocks), STEP) - 1e-9)), CLASSES - 1)
