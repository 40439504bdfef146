"""Metrics by tenant with bounded labels: the tenants that spend most have their own label, all others are "other".

A request adds to one `_Sums` (`TenantMetrics.sums`). At each scrape these sums are moved to the counters that
Prometheus reads, under the tenant's own name or under "other". A counter therefore never decreases, whichever tenants
are named: what a tenant spent while it was not named stays in "other".

Tenants are ranked by what they spent, with a half-life of an hour. A tenant replaces a named one only if it spent
clearly more, so that two tenants of equal spend do not take turns. Amounts in different currencies are ranked by their
numbers. Tokens rank tenants that have spent nothing, for example because their models have no price.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from gateway.core.money import ATOM_DECIMALS
from gateway.telemetry import names

PENDING_MAX = 10_000  # sums between two scrapes, after which they are moved without one
RANKED_MAX = 10_000  # tenants that are ranked; those with the lowest rank are forgotten
KEPT_PER_NAMED = 10  # tenants whose counters are kept, for each one that is named
HALF_LIFE_SECONDS = 3600.0
REPLACED_BY = 1.25  # times the spend of a named tenant that another one must have to replace it
TOKENS_PER_UNIT = 1e12  # tokens that rank as high as one unit of money
TOKEN_KINDS = ("input_uncached", "cache_read", "cache_write", "output")

_REQUESTS = "Requests by tenant. other: all tenants but those that spend most (WARMPATH_METRICS_TENANTS)."
_TOKENS = "Tokens processed by upstreams, by tenant."
_COST = "Cost by tenant, in units of the currency. For bills, use the ledger."


class _Sums:
    """What one tenant has used in one latency class and currency since the last scrape. `cost` is in atoms."""

    __slots__ = ("cache_read", "cache_write", "cost", "input_uncached", "output", "requests")

    def __init__(self) -> None:
        self.requests = self.input_uncached = self.cache_read = self.cache_write = self.output = self.cost = 0


class _Counters:
    """The exposed counters of one label value, by latency class."""

    __slots__ = ("cost", "requests", "tokens")

    def __init__(self) -> None:
        self.requests: dict[str, int] = {}
        self.tokens: dict[tuple[str, str], int] = {}  # by class and kind
        self.cost: dict[tuple[str, str], int] = {}  # by class and currency, in atoms


class TenantMetrics(Collector):
    """Prometheus collector of the metrics by tenant. At most `named_max` tenants have their own label at a time."""

    def __init__(self, named_max: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._named_max = named_max
        self._clock = clock
        self._pending: dict[tuple[str, str, str], _Sums] = {}
        self._spend: dict[str, float] = {}  # by tenant, halved every HALF_LIFE_SECONDS
        self._decayed_at = clock()
        self._named: dict[str, None] = {}
        self._counters: dict[str, _Counters] = {names.OTHER: _Counters()}

    def sums(self, tenant: str, class_name: str, currency: str) -> _Sums:
        """The sums to which a request adds. `currency` is empty if the request has no cost."""
        key = (tenant, class_name, currency)
        sums = self._pending.get(key)
        if sums is None:
            if len(self._pending) >= PENDING_MAX:
                self._fold()
            sums = self._pending[key] = _Sums()
        return sums

    def describe(self) -> list[Metric]:
        return list(self._families())

    def collect(self) -> Iterator[Metric]:
        self._fold()
        requests, tokens, cost = self._families()
        for tenant in (*self._named, names.OTHER):
            counters = self._counters[tenant]
            for class_name, count in counters.requests.items():
                requests.add_metric((tenant, class_name), count)
            for (class_name, kind), count in counters.tokens.items():
                tokens.add_metric((tenant, class_name, kind), count)
            for (class_name, currency), atoms in counters.cost.items():
                cost.add_metric((tenant, class_name, currency), atoms / 10**ATOM_DECIMALS)
        return iter((requests, tokens, cost))

    def _families(self) -> tuple[CounterMetricFamily, CounterMetricFamily, CounterMetricFamily]:
        return (
            CounterMetricFamily("warmpath_tenant_requests", _REQUESTS, labels=("tenant", "class")),
            CounterMetricFamily("warmpath_tenant_tokens", _TOKENS, labels=("tenant", "class", "kind")),
            CounterMetricFamily("warmpath_tenant_cost", _COST, labels=("tenant", "class", "currency")),
        )

    def _fold(self) -> None:
        """Move the sums since the last call to the counters."""
        self._rank()
        for (tenant, class_name, currency), sums in self._pending.items():
            label = tenant if tenant in self._named else names.OTHER
            counters = self._counters.setdefault(label, _Counters())
            counters.requests[class_name] = counters.requests.get(class_name, 0) + sums.requests
            for kind in TOKEN_KINDS:
                key = (class_name, kind)
                counters.tokens[key] = counters.tokens.get(key, 0) + getattr(sums, kind)
            if currency:
                key = (class_name, currency)
                counters.cost[key] = counters.cost.get(key, 0) + sums.cost
        self._pending.clear()
        for tenant in [each for each in self._counters if each not in self._named and each != names.OTHER]:
            if len(self._counters) <= KEPT_PER_NAMED * self._named_max + 1:
                break
            del self._counters[tenant]

    def _rank(self) -> None:
        """Update each tenant's spend, and choose the tenants that are named."""
        now, spend = self._clock(), self._spend
        factor = 0.5 ** ((now - self._decayed_at) / HALF_LIFE_SECONDS)
        self._decayed_at = now
        for tenant in spend:
            spend[tenant] *= factor
        for (tenant, _, _), sums in self._pending.items():
            tokens = sums.input_uncached + sums.cache_read + sums.cache_write + sums.output + sums.requests
            spend[tenant] = spend.get(tenant, 0.0) + sums.cost / 10**ATOM_DECIMALS + tokens / TOKENS_PER_UNIT
        ranked = sorted(spend, key=spend.__getitem__, reverse=True)
        for tenant in ranked[RANKED_MAX:]:
            del spend[tenant]
        challengers = [tenant for tenant in ranked[: self._named_max] if tenant not in self._named]
        for tenant in challengers:
            if len(self._named) < self._named_max:
                self._name(tenant)
                continue
            least = min(self._named, key=lambda each: spend.get(each, 0.0))
            if spend[tenant] <= REPLACED_BY * spend.get(least, 0.0):
                break
            del self._named[least]
            self._name(tenant)

    def _name(self, tenant: str) -> None:
        self._named[tenant] = None
        self._counters.setdefault(tenant, _Counters())
