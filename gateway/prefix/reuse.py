"""Learns how likely it is that a conversation continues, from how long ago its last call was.

The age of a conversation at a deployment is the number of calls there since its own last one. The curve says which
share of the conversations that reached an age had another call later. Calls at all deployments are counted, and the
newest count most.

    reuse_share(age) = continued at that age or a later one / conversations that reached that age
"""

from __future__ import annotations

from collections.abc import Sequence

AGES = 24  # age classes: 0, 1, 2 to 3, 4 to 7, ...
KEPT = 0.999  # of the earlier counts' weight, with each call
PRIOR_CALLS = 8.0  # the weight of the first assumption
PRIOR_USES = 4.0  # the first assumption: min(1, PRIOR_USES / (1 + age))


class ReuseCurve:
    """The curve of one fleet. Owned by the event loop."""

    def __init__(self) -> None:
        self._calls = 0.0  # decayed
        self._continued = [0.0] * AGES  # by the age class at which a conversation continued
        self._shares: Sequence[float] | None = None

    def note_call(self, continued_after: int | None) -> None:
        """A call was sent. It continues a conversation of that age, or begins one (None)."""
        self._calls = self._calls * KEPT + 1.0
        self._continued = [KEPT * count for count in self._continued]
        if continued_after is not None:
            self._continued[_age_class(continued_after)] += 1.0
        self._shares = None

    def share(self, age: float) -> float:
        """The expected share of conversations of this age that continue."""
        if self._shares is None:
            self._shares = self._compute()
        return self._shares[_age_class(int(age))]

    def _compute(self) -> list[float]:
        shares: list[float] = []
        reached, later = self._calls, sum(self._continued)
        for age_class, count in enumerate(self._continued):
            prior = min(1.0, PRIOR_USES / (1 + (1 << age_class >> 1)))
            shares.append(min(1.0, (later + PRIOR_CALLS * prior) / (max(reached, later) + PRIOR_CALLS)))
            reached, later = reached - count, later - count
        return shares


def _age_class(age: int) -> int:
    return min(age.bit_length(), AGES - 1)
