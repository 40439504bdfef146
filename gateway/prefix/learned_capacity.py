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
loses all of them), so the first reported one ends the policy's guess.

Deployments that the policy describes as equal share what they see (`CapacityGroup`), which counts like
`GROUP_RESPONSES` of their own.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
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
        self,
        parts: Iterable[Part],
        cached_blocks: float,
        *,
        responses: int = 1,
        is_surprise: bool,
        is_reported: bool = False,
    ) -> bool:
        """So many responses found so many of these blocks cached. True if the estimate changed.

        `is_surprise`: it was predicted otherwise, so the estimate is computed at once. `is_reported`: the engine said
        so; else it was concluded from times, and is not exact.
        """
        ordered = sorted(parts)
        known_blocks = sum(blocks for _, blocks in ordered)
        if not known_blocks:
            return False
        found, before = min(max(0.0, cached_blocks), known_blocks), 0.0
        changes: list[tuple[int, float]] = []
        for distance, blocks in ordered:
            # A cache that has no room for all of them has evicted the last ones.
            piece, start = max(blocks / PIECES, PIECE_MIN_BLOCKS), 0.0
            while start < blocks:
                length = min(piece, blocks - start)
                change = abs(found - before - length) - abs(found - before)
                changes.append((_step(distance + start + length / 2), responses * change / known_blocks))
                before, start = before + length, start + length
        self._errors.add(changes)
        self._guess_weight = 0.0 if is_reported and _is_cut(ordered, found) else KEPT * self._guess_weight
        if self.group is not None:
            self.group.errors.add(changes)
        self._since += 1
        if not is_surprise and self._since < RECOMPUTED_EVERY:
            return False
        self._since = 0
        before, self.blocks = self.blocks, self._best()
        return self.blocks != before

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


def _is_cut(parts: Sequence[Part], found: float) -> bool:
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
