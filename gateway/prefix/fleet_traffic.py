"""What the calls to some deployments have in common. Deployments that serve one model share one `FleetTraffic`.

Deployments of different models do not, unless one deployment serves both: a beginning that all calls of a small model
have in common must not seem rare because another model has many calls.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter, itemgetter
from typing import TYPE_CHECKING

from gateway.prefix.fingerprint import BLOCK_TOKENS
from gateway.prefix.holders import Holders
from gateway.prefix.popularity import Popularity
from gateway.prefix.reuse import ReuseCurve

if TYPE_CHECKING:
    from gateway.prefix.estimate import Estimate
    from gateway.prefix.prefill_speed import PrefillSpeed

PRESSURE_VALID_SECONDS = 0.1
SETS_MAX = 64  # of deployments, whose pressure and order are remembered: all of a model, those that support a feature
UTILISATION_MAX = 0.9  # in a pressure, which is infinite at 1


class FleetTraffic:
    """Owned by the event loop."""

    def __init__(self) -> None:
        self.reuse = ReuseCurve()
        self.popularity = Popularity()
        self.holders: Holders[Estimate] = Holders()
        self.queued: dict[str, int] = {}  # calls in the gateway's queue, by model
        # By deployments: when it was computed, the pressure, and the work.
        self._pressures: dict[tuple[Estimate, ...], tuple[float, float, float]] = {}
        self._by_name: dict[tuple[Estimate, ...], list[Estimate]] = {}

    def note_call(self, chain: Sequence[int], holder: Estimate) -> None:
        """A call with this prompt was sent to a deployment."""
        self.popularity.note_call(chain)
        self.holders.note_call(chain, holder)

    def popular_beginning(self, chain: Sequence[int], deployments: int, cached: Sequence[float]) -> int:
        """The number of tokens at the prompt's beginning that too few caches hold.

        So many calls begin with it that they are more than a fair share of the deployments that have it cached.
        `cached` has the prompt's cached tokens at those that are compared.
        """
        blocks, share = self.popularity.popular_blocks(chain, 1 / deployments) if deployments > 1 else (0, 0.0)
        tokens = blocks * BLOCK_TOKENS
        if not blocks or sum(cached_tokens >= tokens for cached_tokens in cached) / len(cached) >= share:
            return 0
        return tokens

    @property
    def queued_calls(self) -> int:
        """Calls in the gateway's queue, of all models."""
        return sum(self.queued.values())

    def pressure(self, estimates: tuple[Estimate, ...], now: float) -> tuple[float, float]:
        """By how many seconds a second of computation delays other calls, and the mean work for a prompt.

        The pressure is utilisation / (1 - utilisation), over these deployments, but at most the number of calls that
        wait while one of them computes. A conversation whose calls follow each other keeps a deployment busy, and
        delays no other call. It is computed ten times a second, because it changes slowly, and so is the pressure of
        each deployment alone.
        """
        at, pressure, work = self._pressures.get(estimates, (-math.inf, 0.0, 0.0))
        if not 0 <= now - at < PRESSURE_VALID_SECONDS:
            count = len(estimates)
            busy, waiting = 0.0, float(self.queued_calls)
            for estimate in estimates:
                busy_time = estimate.busy_time(now)
                estimate.pressure = _pressure(busy_time.share) * estimate.pace(now)
                estimate.most_calls = busy_time.most_calls
                busy += busy_time.share
                waiting += busy_time.mean_waiting
            pressure = min(_pressure(busy / count), waiting / busy) if busy else 0.0
            work = sum(estimate.mean_work for estimate in estimates) / count
            if len(self._pressures) >= SETS_MAX:
                self._pressures.clear()
            self._pressures[estimates] = now, pressure, work
        return pressure, work

    def by_name(self, estimates: tuple[Estimate, ...], names: Callable[[], Iterable[str]]) -> Sequence[Estimate]:
        """These deployments in the order of their names. `names` is called only if the order is not yet known."""
        known = self._by_name.get(estimates)
        if known is None:
            if len(self._by_name) >= SETS_MAX:
                self._by_name.clear()
            named = zip(names(), estimates, strict=True)
            known = self._by_name[estimates] = [estimate for _, estimate in sorted(named, key=itemgetter(0))]
        return known


def speed_of(estimate: Estimate, estimates: Sequence[Estimate]) -> PrefillSpeed:
    """A deployment's speed; if it is not yet measured, the median speed of those that are.

    If the policy's guess were used and were too low, the deployment would never get a call, and never be measured.
    """
    if not estimate.speed.is_measured:
        measured = [other.speed for other in estimates if other.speed.is_measured]
        if measured:
            return sorted(measured, key=attrgetter("tokens_per_second"))[len(measured) // 2].fitted()
    return estimate.speed.fitted()


def _pressure(utilisation: float) -> float:
    utilisation = min(utilisation, UTILISATION_MAX)
    return utilisation / (1 - utilisation)
