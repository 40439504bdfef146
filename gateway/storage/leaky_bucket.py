"""Rate limits: the generic cell rate algorithm (GCRA) as a leaky bucket, with exact refunds.

A bucket leaks `limit / period_seconds` per second. An amount may be poured in if the level does not exceed `limit`
afterwards. This is the continuous-state form of the GCRA (ITU-T I.371, annex A). The level is kept in the limit's own
unit instead of as a theoretical arrival time, so that it stays meaningful if a new policy changes the limit.

A call pours in its worst case and later gets a refund of what it did not use. Subtracting the difference would be
wrong. What was poured in long ago has leaked out since, so a full refund would remove what other calls poured in
meanwhile. For example, with a limit of 100 a minute: A takes 100. 59 seconds later, B takes 98 and A returns its 100.
Then C takes 100, which makes 198 in one instant. If A had taken less, the level would have been lower ever since, but
never below zero. So a refund is bounded by the lowest level since the amount was poured in. The bucket is then exactly
as if A had taken only what it used.

For this, a bucket remembers its *troughs*: the levels just before each pouring that no later level has undercut, in
rising order. A saturated bucket has a few, an idle one has one. There are never more than `MAX_TROUGHS`: the two oldest
are merged into the lower one, which can only make a refund smaller.

`redis.lua` has the same arithmetic. The contract suite compares all engines with a ten-line definition.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence

from gateway.storage.base import CLOCK_STEP_SECONDS, RateCharge

MAX_TROUGHS = 32
TOLERANCE_SECONDS = 1e-6  # seconds since the epoch have a resolution of 0.24 microseconds as a float

Trough = tuple[float, float]
"""Time and level."""
State = tuple[float, float, float, list[Trough]]
"""A bucket's stored form: the arguments of `LeakyBucket`."""


class LeakyBucket:
    """The level of one rate limit. Amounts are in the limit's unit, times in seconds. Not thread-safe.

    The limit and its period come with each charge. So a changed policy applies to existing buckets at once.
    """

    __slots__ = ("empty_at", "level", "time", "troughs")

    def __init__(
        self, level: float = 0.0, time: float = 0.0, empty_at: float = 0.0, troughs: Sequence[Trough] = ()
    ) -> None:
        self.level = level
        self.time = time  # of the last change; a caller whose time is a little earlier is treated as of this time
        self.empty_at = empty_at  # from then on the bucket equals a new one, and may be deleted
        self.troughs = list(troughs)  # rising by time and by level

    @property
    def state(self) -> State:
        """What to store: the arguments from which `LeakyBucket` makes an equal bucket."""
        return self.level, self.time, self.empty_at, self.troughs

    def room(self, charge: RateCharge, now: float) -> float:
        """How much may be poured in now; negative if in debt. Includes what leaks in `TOLERANCE_SECONDS`."""
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
        """Pour `amount` in, whether or not there is room. Returns the room left, negative if there was not enough.

        Afterwards `time` is this pouring's time, which `settle` needs.
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
        return charge.limit - level + TOLERANCE_SECONDS * (1 + leak) - amount  # bit for bit the result of `room`

    def unpour(self, charge: RateCharge) -> None:
        """Undo the last `pour`; no other change may have happened since. Its trough stays: the level was that low."""
        self.level = self.troughs[-1][1]
        self.empty_at = self.time + self.level * charge.period_seconds / charge.limit

    def settle(self, used: int, charge: RateCharge, poured_at: float, now: float) -> None:
        """Replace the amount poured in at `poured_at` by what was used: refund the rest, or pour in the excess."""
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
        if not self.level:  # everything has leaked out, so there is nothing to refund
            return
        set_back = poured_at > self.time  # the clock was set back since
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
        """The clock was set back: continue from the new time with the same level.

        Otherwise nothing would leak until the clock reaches the old time again. Refunds of earlier pourings are then
        bounded by the lowest level since.
        """
        self.time = now
        self.empty_at = now + self.level / leak
        self.troughs = [(now, level) for _, level in self.troughs[:1]]

    def _leak(self, now: float, leak: float) -> None:
        """Let the bucket leak until `now`, which is later than the last change."""
        level = self.level - (now - self.time) * leak
        self.level = level if level > 0 else 0.0
        self.time = now
