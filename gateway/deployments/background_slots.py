"""How many of a deployment's slots background calls may use, such as batches."""

from __future__ import annotations

import math

PEAK_DECAY_SECONDS = 60.0  # in which the peak of slots in use decays to 1/e


class BackgroundSlots:
    """How many slots of one deployment background calls may use: calls whose class sets `hold`, such as batches.

    They may use the slots that other calls left free at their recent peak, which decays. One background call is allowed
    if there are no other calls.
    """

    __slots__ = ("_peak", "_peak_at", "taken")

    def __init__(self) -> None:
        self.taken = 0  # by background calls
        self._peak = 0.0  # slots that other calls used; decays from `_peak_at` on
        self._peak_at = -math.inf

    def note_urgent(self, count: int, now: float) -> None:
        """Other calls use `count` slots now."""
        self._peak, self._peak_at = count if count >= self._peak else max(count, self._decayed_peak(now)), now

    def limit(self, slots: int, urgent: int, now: float) -> int:
        """How many of `slots` background calls may use while other calls use `urgent` of them."""
        return max(slots - max(urgent, round(self._decayed_peak(now))), 0 if urgent else 1)

    def _decayed_peak(self, now: float) -> float:
        return self._peak * math.exp((self._peak_at - now) / PEAK_DECAY_SECONDS)
