"""What the calls of a whole fleet have in common. All deployments of a fleet share one `FleetTraffic`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from gateway.prefix.holders import Holders
from gateway.prefix.popularity import Popularity
from gateway.prefix.reuse import ReuseCurve

if TYPE_CHECKING:
    from gateway.prefix.estimate import Estimate

PRESSURE_VALID_SECONDS = 0.1
MODELS_MAX = 4096  # whose pressure is remembered
UTILISATION_MAX = 0.9  # in the pressure, which is infinite at 1


class FleetTraffic:
    """Owned by the event loop."""

    def __init__(self) -> None:
        self.reuse = ReuseCurve()
        self.popularity = Popularity()
        self.holders: Holders[Estimate] = Holders()
        self._pressures: dict[tuple[str, int], tuple[float, float, float]] = {}  # by model: when, pressure, tokens

    def note_call(self, chain: Sequence[int], holder: Estimate) -> None:
        """A call with this prompt was sent to a deployment."""
        self.popularity.note_call(chain)
        self.holders.note_call(chain, holder)

    def pressure(self, model: str, estimates: Sequence[Estimate], now: float) -> tuple[float, float]:
        """By how many seconds a second of computation delays other calls, and the mean uncached tokens of a prompt.

        The pressure is utilisation / (1 - utilisation), over the deployments of a model. It is computed ten times a
        second, because it changes slowly.
        """
        key = model, len(estimates)
        at, pressure, tokens = self._pressures.get(key, (-math.inf, 0.0, 0.0))
        if not 0 <= now - at < PRESSURE_VALID_SECONDS:
            count = len(estimates)
            utilisation = min(sum(estimate.utilisation(now) for estimate in estimates) / count, UTILISATION_MAX)
            pressure = utilisation / (1 - utilisation)
            tokens = sum(estimate.mean_uncached_tokens for estimate in estimates) / count
            if len(self._pressures) > MODELS_MAX:
                self._pressures.clear()
            self._pressures[key] = now, pressure, tokens
        return pressure, tokens
