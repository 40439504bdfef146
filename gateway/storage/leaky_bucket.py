"""The generic cell rate algorithm as a leaky bucket, with refunds that are exact.

A bucket leaks `limit / period_seconds` per second and never holds more than `limit` when something is poured in. That
is the continuous-state form of the GCRA (ITU-T I.371, annex A); keeping the level in the limit's own unit, instead of
a theoretical arrival time, keeps it meaningful when a new policy changes the limit.

A call pours in its worst case and gets back later what it did not use. Subtracting the difference would be wrong: what
was poured in long ago has leaked out since, and a full refund would empty the bucket for what others poured in
meanwhile. (Limit 100 a minute: A takes 100; 59 seconds later B takes 98 and A returns its 100; then C takes 100. 198
in one instant.) Had A taken less, the level would have been lower all the time since, but never below zero. So a refund
is bounded by the lowest level since that pouring, and the bucket is then exactly as if A had asked for the truth.

To know that, a bucket remembers its *troughs*: the levels just before each pouring that no later one has undercut, in
rising order. At saturation there are a few, in an idle bucket one; never more than `MAX_TROUGHS`, since the two oldest
are merged into the lower one, which can only make a refund smaller.

`redis.lua` holds the same arithmetic; the contract suite compares them all with the ten-line definition.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence

from gateway.storage.base import CLOCK_STEP_SECONDS, RateCharge

MAX_TROUGHS = 32
TOLERANCE_SECONDS = 1e-6  # a time of today has a resolution of 0.24 microseconds as a float

Trough = tuple[float, float]
"""Time and level."""
State = tuple[float, float, float, list[Trough]]
"""A bucket as it is stored: the arguments that make it."""


class LeakyBucket:
    __slots__ = ("empty_at", "level", "time", "troughs")

    def __init__(
        self, level: float = 0.0, time: float = 0.0, empty_at: float = 0.0, troughs: Sequence[Trough] = ()
    ) -> None:
        self.level = level
        self.time = time  # of the last change; for callers who are a little late, time stands still
        self.empty_at = empty_at  # from then on a bucket is like a new one, and may be forgotten
        self.troughs = list(troughs)  # both rising

    @property
    def state(self) -> State:
        return self.level, self.time, self.empty_at, self.troughs

    def room(self, charge: RateCharge, now: float) -> float:
        """How much may be poured in now; below zero in debt. Includes what leaks in `TOLERANCE_SECONDS`."""
        limit, level = charge.limit, self.level
        leak = limit / charge.period_seconds
        if now < self.time - CLOCK_STEP_SECONDS:
            self._set_back(now, leak)
        if level and now > self.time:
            level -= (now - self.time) * leak
            if level < 0:
                level = 0.0
        return limit - level + TOLERANCE_SECONDS * (1 + leak)

    def pour(self, amount: int, charge: RateCharge, now: float) -> float:
        """Whether or not there is room: returns how much is left then, below zero where there was not enough. `time` is
        now that of this pouring, to be named in `settle`.
        """
        leak = charge.limit / charge.period_seconds
        if now > self.time:
            self._leak(now, leak)
        elif now < self.time - CLOCK_STEP_SECONDS:
            self._set_back(now, leak)
        time, level, troughs = self.time, self.level, self.troughs
        while troughs and troughs[-1][1] >= level:
            troughs.pop()
        troughs.append((time, level))
        if len(troughs) > MAX_TROUGHS:
            (_, lower), (later, _) = troughs[:2]
            troughs[:2] = [(later, lower)]
        self.level = full = level + amount
        self.empty_at = time + full / leak
        return charge.limit - level + TOLERANCE_SECONDS * (1 + leak) - amount  # as `room` says it, to the last bit

    def unpour(self, charge: RateCharge) -> None:
        """Undo the last pouring, before anything else. Its trough stays: so low was the level at that time."""
        self.level = self.troughs[-1][1]
        self.empty_at = self.time + self.level * charge.period_seconds / charge.limit

    def settle(self, used: int, charge: RateCharge, poured_at: float, now: float) -> None:
        """Replace what was poured for the charge by what was used."""
        unused = charge.amount - used
        if unused <= 0:
            if unused < 0:
                self.pour(-unused, charge, now)
            return
        leak = charge.limit / charge.period_seconds
        if now > self.time:
            self._leak(now, leak)
        elif now < self.time - CLOCK_STEP_SECONDS:
            self._set_back(now, leak)
        if not self.level:  # all of it has leaked out, so that there is nothing to return
            return
        set_back = poured_at > self.time  # since it was poured
        first_later = 0 if set_back else bisect_right(self.troughs, (poured_at, math.inf))
        later = self.troughs[first_later:]
        refund = min(unused, later[0][1] if later else self.level, self.level)
        self.level -= refund
        self.empty_at = self.time + self.level / leak
        if later:
            lowered = [(time, level - refund) for time, level in later]
            earlier = self.troughs[:first_later]
            self.troughs = [trough for trough in earlier if trough[1] < lowered[0][1]] + lowered

    def _set_back(self, now: float, leak: float) -> None:
        """The clock was set back: go on from there with what is in. Otherwise nothing would leak until it is as late
        again. Of what was poured by the time before, no more than the lowest level since can be returned.
        """
        self.time = now
        self.empty_at = now + self.level / leak
        self.troughs = [(now, level) for _, level in self.troughs[:1]]

    def _leak(self, now: float, leak: float) -> None:
        """Until `now`, which is later than the last change."""
        level = self.level - (now - self.time) * leak
        self.level = level if level > 0 else 0.0
        self.time = now
