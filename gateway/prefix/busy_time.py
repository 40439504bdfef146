"""How busy one deployment is: how much of the time it computes prompts, and how many others wait meanwhile.

Both are averages over the last `MEAN_SECONDS`, and older times count less. The most calls that were there at once are
forgotten as fast.
"""

from __future__ import annotations

import math

MEAN_SECONDS = 20.0


class BusyTime:
    """The averages of one deployment. Owned by the event loop."""

    def __init__(self) -> None:
        self.share = 0.0  # of the time in which prompts were computed, 0 to 1
        self.mean_waiting = 0.0  # prompts that waited until others were computed
        self.most_calls = 0.0  # that were there at once
        self.noted_at = 0.0

    def note(self, now: float, prompts: float, calls: int) -> None:
        """Add the time since the last note.

        `prompts`: that were computed or waited since then, perhaps a fraction of one. `calls`: that were in flight.
        """
        kept = math.exp((self.noted_at - now) / MEAN_SECONDS)
        self.noted_at = now
        self.share *= kept
        self.mean_waiting *= kept
        self.most_calls *= kept
        if calls > self.most_calls:
            self.most_calls = calls
        if prompts:
            self.share += 1 - kept
            if prompts > 1:
                self.mean_waiting += (1 - kept) * (prompts - 1)
