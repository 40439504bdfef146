"""What the calls to some deployments have in common. Deployments that serve one model share one `FleetTraffic`.

Deployments of different models do not, unless one deployment serves both: a beginning that all calls of a small model
have in common must not seem rare because another model has many calls.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from operator import itemgetter
from typing import TYPE_CHECKING

from gateway.prefix.holders import Holders
from gateway.prefix.popularity import Popularity
from gateway.prefix.reuse import ReuseCurve

if TYPE_CHECKING:
    from gateway.prefix.estimate import Estimate

PRESSURE_VALID_SECONDS = 0.1
SETS_MAX = 64  # of deployments, whose pressure and order are remembered: all of a model, those that support a feature
UTILISATION_MAX = 0.9  # in the pressure, which is infinite at 1


class FleetTraffic:
    """Owned by the event loop."""

    def __init__(self) -> None:
        self.reuse = ReuseCurve()
        self.popularity = Popularity()
        self.holders: Holders[Estimate] = Holders()
        # By deployments: when it was computed, the pressure, and the tokens.
        self._pressures: dict[tuple[Estimate, ...], tuple[float, float, float]] = {}
        self._by_name: dict[tuple[Estimate, ...], list[Estimate]] = {}

    def note_call(self, chain: Sequence[int], holder: Estimate) -> None:
        """A call with this prompt was sent to a deployment."""
        self.popularity.note_call(chain)
        self.holders.note_call(chain, holder)

    def pressure(self, estimates: tuple[Estimate, ...], now: float) -> tuple[float, float]:
        """By how many seconds a second of computation delays other calls, and the mean uncached tokens of a prompt.

        The pressure is utilisation / (1 - utilisation), over these deployments. It is computed ten times a second,
        because it changes slowly.
        """
        at, pressure, tokens = self._pressures.get(estimates, (-math.inf, 0.0, 0.0))
        if not 0 <= now - at < PRESSURE_VALID_SECONDS:
            count = len(estimates)
            utilisation = min(sum(estimate.utilisation(now) for estimate in estimates) / count, UTILISATION_MAX)
            pressure = utilisation / (1 - utilisation)
            tokens = sum(estimate.mean_uncached_tokens for estimate in estimates) / count
            if len(self._pressures) >= SETS_MAX:
                self._pressures.clear()
            self._pressures[estimates] = now, pressure, tokens
        return pressure, tokens

    def by_name(self, estimates: tuple[Estimate, ...], names: Callable[[], Iterable[str]]) -> Sequence[Estimate]:
        """These deployments in the order of their names. `names` is called only if the order is not yet known."""
        known = self._by_name.get(estimates)
        if known is None:
            if len(self._by_name) >= SETS_MAX:
                self._by_name.clear()
            named = zip(names(), estimates, strict=True)
            known = self._by_name[estimates] = [estimate for _, estimate in sorted(named, key=itemgetter(0))]
        return known
