"""The dearest price that one call can meet, for its reservation.

Only prices that can apply count: those of the call's deployments, class and time, of the context lengths that its
prompt may have, and of its service tier, with the tenant's terms. A request without a tier, or with `auto`, may be
served in any tier. Searches and other units that a server runs on its own are not known before the call.
"""

from __future__ import annotations

from decimal import ROUND_CEILING, Decimal
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from gateway.policy.prices import PriceList

if TYPE_CHECKING:
    from gateway.policy.policy import Policy

MAX_CACHED = 10_000  # bounds of one policy, by tenant, model, class and tier
LENGTH_FACTOR = 2  # a prompt may have this many times its estimate
_ANY_TIER = (None, "auto")


CallKind = tuple[str, str, str, str | None]
"""The tenant whose prices a call has, its model, its latency class and the service tier that it asks for."""


class PriceBound(NamedTuple):
    """A price of calls whose prompt has more than `above` tokens: cost per token and per request, in atoms."""

    above: int
    input: int
    output: int
    request: int


class _Bounds(msgspec.Struct, frozen=True):
    since_ns: int
    until_ns: int
    bounds: tuple[PriceBound, ...]


class PriceBounds:
    """The price bounds of one policy, cached by kind of call until a price begins or ends."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._lists: dict[str, tuple[PriceList, ...]] = {}
        for model, entry in policy.price_lists:
            self._lists[model] = (*self._lists.get(model, ()), *policy.possible_price_lists(model, entry))
        self._cached: dict[tuple[str, str, str, str | None], _Bounds] = {}

    def dearest(self, kind: CallKind, time_ns: int, input_tokens: int, output_tokens: int) -> int:
        """The most that a call can cost, in atoms, rounded up. `input_tokens` is an estimate."""
        tenant, model, class_name, service_tier = kind
        tier = None if service_tier in _ANY_TIER else service_tier if service_tier in self._tiers(model) else ""
        key = (tenant, model, class_name, tier)
        known = self._cached.get(key)
        if known is None or not known.since_ns <= time_ns < known.until_ns:
            if len(self._cached) >= MAX_CACHED:
                self._cached.clear()
            known = self._cached[key] = self._find(tenant, model, class_name, tier, time_ns)
        longest, dearest = input_tokens * LENGTH_FACTOR, 0
        for above, per_input, per_output, per_request in known.bounds:
            if longest > above or above == 0:
                cost = input_tokens * per_input + output_tokens * per_output + per_request
                if cost > dearest:
                    dearest = cost
        return dearest

    def _tiers(self, model: str) -> set[str | None]:
        return {tier for prices in self._lists.get(model, ()) for tier in prices.tiers}

    def _find(self, tenant: str, model: str, class_name: str, service_tier: str | None, time_ns: int) -> _Bounds:
        bounds: dict[PriceBound, None] = {}
        since_ns, until_ns = 0, 1 << 63
        for prices in self._lists.get(model, ()):
            tiers = {None, *prices.tiers} if service_tier is None else {service_tier, None}
            for price in prices.prices:
                for moment in price.period_ns:
                    since_ns = max(since_ns, moment) if moment <= time_ns else since_ns
                    until_ns = min(until_ns, moment) if moment > time_ns else until_ns
            for tier in tiers:
                for price in prices.possible(class_name, tier, time_ns):
                    terms = self._policy.terms(tenant, price, model=model, class_name=class_name, time_ns=time_ns)
                    if terms is None:
                        continue
                    factor = terms.factor * terms.rate
                    each = (*price.highest, price.unit_atoms.get("request", 0) * 1_000)
                    bounds[PriceBound(price.above or 0, *(_scaled(atoms, factor) for atoms in each))] = None
        # Terms change at other times than prices, so bounds are kept for a minute at most.
        return _Bounds(since_ns, min(until_ns, time_ns + 60 * 10**9), tuple(bounds))


def _scaled(atoms: int, factor: Decimal) -> int:
    return int((Decimal(atoms) * factor).to_integral_value(rounding=ROUND_CEILING))
