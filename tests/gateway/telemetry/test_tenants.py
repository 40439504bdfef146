"""Metrics by tenant: bounded labels, exact sums, and counters that never decrease."""

from __future__ import annotations

import random

from gateway.core.money import ATOM_DECIMALS
from gateway.telemetry.tenants import HALF_LIFE_SECONDS, TenantMetrics

UNIT = 10**ATOM_DECIMALS


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def spend(metrics: TenantMetrics, tenant: str, amount: float, currency: str = "USD") -> None:
    sums = metrics.sums(tenant, "realtime", currency)
    sums.requests += 1
    sums.output += 7
    sums.cost += int(amount * UNIT)


def cost_by_tenant(metrics: TenantMetrics) -> dict[str, float]:
    requests, tokens, cost = metrics.collect()
    assert sum(s.value for s in tokens.samples) == 7 * sum(s.value for s in requests.samples)
    return {sample.labels["tenant"]: sample.value for sample in cost.samples}


def test_the_tenants_that_spend_most_are_named() -> None:
    metrics = TenantMetrics(2, clock=Clock())
    for tenant, amount in (("a", 1.0), ("b", 5.0), ("c", 3.0), ("d", 0.5)):
        spend(metrics, tenant, amount)
    assert cost_by_tenant(metrics) == {"b": 5.0, "c": 3.0, "other": 1.5}


def test_a_tenant_becomes_named_and_its_earlier_spend_stays_in_other() -> None:
    clock = Clock()
    metrics = TenantMetrics(1, clock=clock)
    spend(metrics, "a", 4.0)
    spend(metrics, "b", 1.0)
    assert cost_by_tenant(metrics) == {"a": 4.0, "other": 1.0}
    spend(metrics, "b", 3.5)  # 4.5 in all: not clearly more than 4
    assert cost_by_tenant(metrics) == {"a": 4.0, "other": 4.5}
    clock.now += 5 * HALF_LIFE_SECONDS
    spend(metrics, "b", 2.0)
    assert cost_by_tenant(metrics) == {"b": 2.0, "other": 4.5}
    clock.now += 5 * HALF_LIFE_SECONDS
    spend(metrics, "a", 1.0)
    assert cost_by_tenant(metrics) == {"a": 5.0, "other": 4.5}, "its counter continues"


def test_currencies_are_never_added_up() -> None:
    metrics = TenantMetrics(2, clock=Clock())
    spend(metrics, "a", 1.0, "USD")
    spend(metrics, "a", 2.0, "EUR")
    _, _, cost = metrics.collect()
    assert {(s.labels["currency"], s.value) for s in cost.samples} == {("USD", 1.0), ("EUR", 2.0)}


def test_no_counter_decreases_and_nothing_is_lost() -> None:
    drawn, clock = random.Random(3), Clock()
    metrics, spent, before = TenantMetrics(5, clock=clock), 0.0, dict[str, float]()
    for _ in range(200):
        for _ in range(drawn.randrange(30)):
            amount = drawn.randrange(1, 9) / 8
            spend(metrics, f"t{int(drawn.expovariate(0.1))}", amount)
            spent += amount
        clock.now += drawn.randrange(3000)
        after = cost_by_tenant(metrics)
        assert len(after) <= 6
        assert all(value >= before[tenant] for tenant, value in after.items() if tenant in before)
        before |= after
    assert sum(before.values()) >= spent, "what left the labels is still in what they showed"
    assert len(metrics._counters) <= 51
