"""When a call is hedged: after which delay a second deployment is tried, and how many hedges the budget allows.

The delay is a fixed time, or a percentile of the model's recent times to the first chunk, as the class's `hedge.after`
says. The budget is a share of the class's calls, so that a slow fleet does not receive every call twice.
"""

from __future__ import annotations

from collections import deque

from gateway.policy import Hedge

SAMPLES = 512  # newest times to the first chunk that are kept for each kind of call
SAMPLES_MIN = 20  # before percentiles are computed
SORT_EVERY = 32  # samples, after which the percentiles are computed again
BUDGET_MAX_HEDGES = 10.0
KINDS_MAX = 1000  # pairs of a model and whether the call streams


class _Delays:
    """The newest times to the first chunk of one kind of call, in seconds."""

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
        """The delay that this share of the samples does not exceed, in seconds; None before `SAMPLES_MIN` samples."""
        if not self._sorted:
            return None
        return self._sorted[min(int(share * len(self._sorted)), len(self._sorted) - 1)]


class HedgeBudget:
    """Delays and budget of hedges. One budget for all classes. Owned by the event loop."""

    def __init__(self) -> None:
        self._delays: dict[tuple[str, bool], _Delays] = {}
        self._budget = 1.0

    def record_first_chunk(self, model: str, stream: bool, seconds: float) -> None:
        """An attempt's first chunk arrived `seconds` after its upstream request was sent."""
        delays = self._delays.get((model, stream))
        if delays is None:
            if len(self._delays) >= KINDS_MAX:
                self._delays.clear()
            delays = self._delays[model, stream] = _Delays()
        delays.add(seconds)

    def note_call(self, hedge: Hedge) -> None:
        """A call arrived: add the class's share of a hedge to the budget."""
        self._budget = min(self._budget + hedge.budget, BUDGET_MAX_HEDGES)

    def delay_seconds(self, hedge: Hedge, model: str, stream: bool) -> float | None:
        """The delay after which a hedge starts; None while there are too few samples."""
        if not isinstance(hedge.after, str):
            return hedge.after
        delays = self._delays.get((model, stream))
        return delays.percentile(float(hedge.after[1:]) / 100) if delays is not None else None

    def take(self) -> bool:
        """Take one hedge from the budget. False if none is left."""
        if self._budget < 1.0:
            return False
        self._budget -= 1.0
        return True
