"""Learns how likely it is that cached blocks are used again, from how long ago they were last used.

The age of a block at a deployment is the number of uses of the deployment's cache since its own last one. The curve
says which share of the blocks that reached an age were used later. Calls at all deployments are counted, and the newest
count most.

    share(age) = blocks that were used again at that age or a later one / blocks that reached that age
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

AGES = 24  # age classes: 0, 1, 2 to 3, 4 to 7, ...
KEPT = 0.999  # of the earlier counts' weight, with each call
WEIGHT_MAX = 1e6  # above it, the counts are scaled back, so that they stay exact
RECOMPUTED_EVERY = 32  # calls: a single one changes little
PRIOR_BLOCKS = 512.0  # the weight of the first assumption
PRIOR_USES = 4.0  # the first assumption: min(1, PRIOR_USES / (1 + age))


class ReuseCurve:
    """The curve of one fleet. Owned by the event loop."""

    def __init__(self) -> None:
        # Instead of decaying all earlier counts, each call weighs more than the one before it.
        self._weight = 1.0
        self._used = 0.0  # weighted blocks
        self._reused = [0.0] * AGES  # weighted blocks, by the age class at which they were used again
        self._shares: Sequence[float] = self._compute()
        self._calls_since = 0  # they were computed

    def note_call(self, blocks: int, reused: Iterable[tuple[int, int]]) -> None:
        """A call uses so many blocks. `reused` has the age and the number of those that were used before."""
        weight = self._weight = self._weight / KEPT
        self._used += weight * blocks
        for age, count in reused:
            self._reused[_age_class(age)] += weight * count
        if weight > WEIGHT_MAX:
            self._weight = 1.0
            self._used /= weight
            self._reused = [count / weight for count in self._reused]
        self._calls_since += 1
        if self._calls_since >= RECOMPUTED_EVERY:
            self._shares, self._calls_since = self._compute(), 0

    def share(self, age: float) -> float:
        """The expected share of blocks of this age that will be used again."""
        return self._shares[_age_class(int(age))]

    def _compute(self) -> list[float]:
        shares: list[float] = []
        reached, later = self._used / self._weight, sum(self._reused) / self._weight
        for age_class, weighted in enumerate(self._reused):
            count = weighted / self._weight
            prior = min(1.0, PRIOR_USES / (1 + (1 << age_class >> 1)))
            shares.append(min(1.0, (later + PRIOR_BLOCKS * prior) / (max(reached, later) + PRIOR_BLOCKS)))
            reached, later = reached - count, later - count
        return shares


def _age_class(age: int) -> int:
    length = age.bit_length()
    return length if length < AGES else AGES - 1
