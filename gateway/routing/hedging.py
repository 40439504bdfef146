"""A second server for a call whose first one is late, within a budget.

Late means later than most: the first chunks of a model's answers are timed, and the class names the percentile of
them (or a fixed time) after which a second server is asked as well. Whoever answers first wins; the other one is
cancelled at once. The budget is a share of the calls, so that a slow fleet is not asked for everything twice.
"""

from __future__ import annotations

from collections import deque

from gateway.policy import Hedge

SAMPLES = 512  # first chunks remembered for each kind of call
SAMPLES_MIN = 20  # before that nobody knows what is late
SORT_EVERY = 32  # samples, after which the percentiles are computed anew
BUDGET_MAX_HEDGES = 10.0
KINDS_MAX = 1000  # models, streamed or not


class _Delays:
    __slots__ = ("_newest", "_seen", "_sorted")

    def __init__(self) -> None:
        self._newest: deque[float] = deque(maxlen=SAMPLES)
        self._sorted: list[float] = []
        self._seen = 0

    def add(self, seconds: float) -> None:
        self._newest.append(seconds)
        self._seen += 1
        if self._seen % SORT_EVERY == 0 or self._seen == SAMPLES_MIN:
            self._sorted = sorted(self._newest)

    def percentile(self, share: float) -> float | None:
        if not self._sorted:
            return None
        return self._sorted[min(int(share * len(self._sorted)), len(self._sorted) - 1)]


class HedgeBudget:
    """What is late, and what of the budget is left. Owned by the event loop."""

    def __init__(self) -> None:
        self._delays: dict[tuple[str, bool], _Delays] = {}
        self._budget = 1.0

    def record_first_chunk(self, model: str, stream: bool, seconds: float) -> None:
        """An answer's first chunk came `seconds` after it was asked for."""
        delays = self._delays.get((model, stream))
        if delays is None:
            if len(self._delays) >= KINDS_MAX:
                self._delays.clear()
            delays = self._delays[model, stream] = _Delays()
        delays.add(seconds)

    def note_call(self, hedge: Hedge) -> None:
        self._budget = min(self._budget + hedge.budget, BUDGET_MAX_HEDGES)

    def delay_seconds(self, hedge: Hedge, model: str, stream: bool) -> float | None:
        """After which a second server is asked; None while that is not known."""
        if not isinstance(hedge.after, str):
            return hedge.after
        delays = self._delays.get((model, stream))
        return delays.percentile(float(hedge.after[1:]) / 100) if delays is not None else None

    def take(self) -> bool:
        """Whether there is budget for one more."""
        if self._budget < 1.0:
            return False
        self._budget -= 1.0
        return True
