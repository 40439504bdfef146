"""Rate limits: the generic cell rate algorithm (GCRA) as a leaky bucket, with exact refunds of unused amounts.

A bucket leaks `limit / period_seconds` per second. An amount may be poured in if the level then does not exceed
`limit`. This is the continuous-state form of the GCRA (ITU-T I.371, annex A). The level is kept in the limit's own
unit instead of as a theoretical arrival time, so that it stays meaningful if a new policy changes the limit.

A call pours in the most that it can use, and later gets a refund of the unused part. It would be wrong to subtract the
complete unused part from the level. An amount that was poured in long ago has leaked out, so a full refund would remove
amounts that other calls poured in meanwhile. Example with a limit of 100 per minute: call A takes 100. 59 seconds
later, call B takes 98, and A returns its 100. Then call C takes 100, so B and C together take 198 in one instant. If A
had taken less, the level would have been lower since then, but never below zero. A refund is therefore limited to the
lowest level since the amount was poured in. The bucket is then in the same state as if A had taken only the amount that
it used.

For this limit, a bucket records *troughs*: the level just before an amount was poured in, if no later level was lower.
Troughs are in rising order. A saturated bucket has a few troughs, and an idle bucket has one. If there are more than
`MAX_TROUGHS`, the two oldest are merged into the lower one, which can only make a refund smaller.

`redis.lua` has the same arithmetic. The contract tests compare all engines with a definition of ten lines.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence

from gateway.storage.base import CLOCK_STEP_SECONDS, RateCharge

MAX_TROUGHS = 32
TOLERANCE_SECONDS = 1e-6  # seconds since the epoch have a resolution of 0.24 microseconds as a float

Trough = tuple[float, float]
"""The time and the level of a trough."""
State = tuple[float, float, float, list[Trough]]
"""The stored form of a bucket: the arguments of `LeakyBucket`."""


class LeakyBucket:
    """The state of one rate limit. Amounts are in the limit's unit, and times are in seconds. Not thread-safe.

    Each charge contains the limit and its period, so a changed policy applies to existing buckets at once.
    """

    __slots__ = ("empty_at", "level", "time", "troughs")

    def __init__(
        self, level: float = 0.0, time: float = 0.0, empty_at: float = 0.0, troughs: Sequence[Trough] = ()
    ) -> None:
        self.level = level
        self.time = time  # time of the last change; slightly earlier times of callers are replaced by it
        self.empty_at = empty_at  # after this time the bucket equals a new one and may be deleted
        self.troughs = list(troughs)  # rising by time and by level

    @property
    def state(self) -> State:
        """Return the state to store: the arguments that create an equal `LeakyBucket`."""
        return self.level, self.time, self.empty_at, self.troughs

    def room(self, charge: RateCharge, now: float) -> float:
        """Return the amount that may be poured in now, which is negative if the limit is in debt.

        The amount includes what leaks in `TOLERANCE_SECONDS`.
        """
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
        """Pour in `amount`, even if there is not enough room. Returns the room left, which is then negative.

        Sets `time` to the time of this operation, which the caller must keep for `settle`.
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
        """Undo the last `pour`. The bucket must not have changed since then.

        The trough of that `pour` stays, because the level was really that low.
        """
        self.level = self.troughs[-1][1]
        self.empty_at = self.time + self.level * charge.period_seconds / charge.limit

    def settle(self, used: int, charge: RateCharge, poured_at: float, now: float) -> None:
        """Replace the amount poured in at `poured_at` by the used amount. Refunds the rest, or pours in the excess."""
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
        set_back = poured_at > self.time  # whether the clock has been set back since then
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
        """Continue from a clock that was set back to `now`, with the same level.

        Otherwise the bucket would not leak until the clock reaches the old time. Refunds of earlier amounts are then
        limited to the lowest level since the clock was set back.
        """
        self.time = now
        self.empty_at = now + self.level / leak
        self.troughs = [(now, level) for _, level in self.troughs[:1]]

    def _leak(self, now: float, leak: float) -> None:
        """Let the bucket leak until `now`, which must be later than the last change."""
        level = self.level - (now - self.time) * leak
        self.level = level if level > 0 else 0.0
        self.time = now
