"""Prices as vendors have them: every sum is exact, and can be computed again from the receipt's own policy."""

from __future__ import annotations

from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.billing.ledger.rows import encode
from gateway.billing.receipts import bill_of, cost_of, make_receipt
from gateway.billing.repricing import reprice
from gateway.core.money import ATOM_DECIMALS, atoms_to_text
from gateway.core.times import rfc3339_to_ns
from gateway.policy import Policy, Price
from gateway.policy.history import NotInHistory, load, record
from gateway.policy.tenant_prices import Terms
from gateway.types import Outcome, PhaseTimings, Usage
from tests.gateway.calls import a_call

ARRIVED_NS = rfc3339_to_ns("2026-11-20T10:00:00Z")
counts = st.integers(0, 10**9)
amounts = st.decimals(0, 1000, places=9)


def policy(
    *prices: dict[str, Any], rates: list[dict[str, Any]] | None = None, region: str | None = None, **tenant: Any
) -> Policy:
    return Policy.model_validate(
        {
            "deployments": [
                {"name": "a", "base_url": "http://a/v1", "model": "m", "price": list(prices), "region": region}
            ],
            "models": [{"name": "m", "deployments": ["a"]}],
            "exchange_rates": rates or [],
            "tenants": [{"name": "t", **tenant}],
        }
    )  # fmt: skip


def billed(of: Policy, usage: Usage, tier: str | None = None, class_name: str = "realtime") -> str | None:
    call = msgspec.structs.replace(a_call(policy=of), class_name=class_name)
    cost = bill_of(call, usage, of.deployments[0], arrived_ns=ARRIVED_NS, service_tier=tier).cost
    return None if cost is None else atoms_to_text(cost)


MILLION = Usage(1_000_000)


def test_a_long_prompt_has_another_price() -> None:
    steps = policy({"input": 2, "above": 200_000}, {"input": 1})
    assert billed(steps, Usage(100_000, 100_000)) == "0.2"
    assert billed(steps, Usage(100_001, 100_000)) == "0.400002", "cached tokens count towards the length"


def test_what_is_no_token_is_priced_by_the_unit() -> None:
    units = policy({"input": 1, "request": "0.001", "search": "0.01", "second": "0.0001", "image": 2, "tool": "0.5"})
    usage = Usage(1_000_000, units=(("search", 3_000), ("second", 1_500), ("image", 1_000), ("tool", 2_000)))
    assert billed(units, usage) == "4.03115"
    assert billed(units, Usage()) == "0", "a request that used nothing"


def test_the_storage_of_a_cache_is_priced_by_its_time() -> None:
    stored = policy({"input": 0, "cache_storage": 12})
    assert billed(stored, Usage(cache_write=1_000_000)) == "1", "five minutes"
    assert billed(stored, Usage(cache_write=1_000_000, cache_write_1h=1_000_000)) == "12"


@pytest.mark.parametrize(
    ("tier", "class_name", "granted", "cost"),
    [
        ("flex", "realtime", {}, "2"),
        ("flex", "realtime", {"service_tiers": ["flex"]}, "1"),
        ("priority", "realtime", {}, "4"),
        (None, "realtime", {}, "2"),
        ("unknown", "realtime", {"service_tiers": ["unknown"]}, "2"),
    ],
)
def test_a_request_for_a_tier_lowers_its_price_only_if_the_policy_grants_it(
    tier: str | None, class_name: str, granted: dict[str, Any], cost: str
) -> None:
    prices = ({"input": 1, "service_tier": "flex"}, {"input": 4, "service_tier": "priority"}, {"input": 2})
    assert billed(policy(*prices, **granted), MILLION, tier, class_name) == cost


def test_regions_have_prices_of_their_own() -> None:
    prices = ({"input": 3, "region": "eu"}, {"input": 1})
    assert billed(policy(*prices, region="eu"), MILLION) == "3"
    assert billed(policy(*prices, region="us"), MILLION) == billed(policy(*prices), MILLION) == "1"


def test_a_tenant_pays_its_factor_and_in_its_currency_at_the_rate_of_the_day() -> None:
    rates = [
        {"base": "USD", "quote": "EUR", "rate": "0.9", "until": "2026-11-20"},
        {"base": "USD", "quote": "EUR", "rate": "0.92", "from": "2026-11-20", "until": "2026-11-21"},
    ]
    pricing = [{"factor": "0.5", "reason": "batch", "class": "batch"}, {"factor": "1.2", "reason": "markup"}]
    both = policy({"input": 1}, rates=rates, pricing=pricing, currency="EUR")
    assert billed(both, MILLION) == "1.104"
    assert billed(both, MILLION, class_name="batch") == "0.46"
    expired = policy({"input": 1}, rates=rates[:1], currency="EUR")
    assert billed(expired, MILLION) is None, "unpriced, and not free"
    with pytest.raises(ValueError, match="no exchange rate from USD"):
        policy({"input": 1}, currency="EUR")


@given(
    cost=st.integers(0, 10**24),
    factor=st.decimals(0, 1000, places=9),
    rate=st.decimals(Decimal("0.000000001"), 10**6, places=9),
)
def test_terms_are_rounded_once_and_by_half_an_atom_at_most(cost: int, factor: Decimal, rate: Decimal) -> None:
    exact = Fraction(factor) * Fraction(rate) * cost
    assert abs(Terms(factor, rate, "EUR").apply(cost) - exact) <= Fraction(1, 2)


@given(
    usage=st.builds(
        Usage, counts, counts, st.just(0), counts,
        units=st.lists(st.tuples(st.sampled_from(["search", "tool", "image", "second"]), st.integers(0, 10**6)),
                       unique_by=lambda unit: unit[0]).map(tuple),
    ),
    prices=st.fixed_dictionaries(dict.fromkeys(("input", "output", "request", "search", "tool", "second"), amounts)),
)  # fmt: skip
def test_the_sum_of_all_parts_is_exact(usage: Usage, prices: dict[str, Decimal]) -> None:
    price = Price(**prices)
    expected = Fraction(usage.input * price.input + usage.output * price.output) / 10**6
    expected += sum(Fraction(getattr(price, unit)) * milli / 1000 for unit, milli in usage.units)
    expected += Fraction(price.request) if usage.total or usage.units else 0
    assert Fraction(cost_of(usage, price), 10**ATOM_DECIMALS) == expected


def test_every_receipt_can_be_priced_again_from_the_history(tmp_path: Path) -> None:
    of = policy(
        {"input": 1, "output": 2, "above": 10, "search": "0.01"}, {"input": 3, "cache_storage": 1},
        rates=[{"base": "USD", "quote": "EUR", "rate": "0.917"}], pricing=[{"factor": "1.13", "reason": "markup"}],
        currency="EUR",
    )  # fmt: skip
    record(of, tmp_path / "policies")
    again = load(of.hash, tmp_path / "policies")
    timings = PhaseTimings()
    timings.started_ns = ARRIVED_NS
    for usage in (Usage(7, 1, 2, 5), Usage(11, 4, output=9, units=(("search", 2_000),))):
        bill = bill_of(a_call(policy=of), usage, of.deployments[0], arrived_ns=ARRIVED_NS)
        receipt = make_receipt(
            a_call(policy=of), usage, outcome=Outcome.COMPLETE, timings=timings, bill=bill, deployment=of.deployments[0]
        )
        row = {name: getattr(receipt, name) for name in receipt.__struct_fields__}
        row["units"] = msgspec.json.encode(receipt.units).decode()
        computed = reprice(again, row)
        assert computed is not None and computed.cost is not None and b"price_factor" in encode(receipt)
        assert atoms_to_text(computed.cost) == receipt.cost
        assert (receipt.currency, receipt.price_currency, receipt.exchange_rate) == ("EUR", "USD", "0.917")
    file = tmp_path / "policies" / f"{of.hash}.json"
    file.write_bytes(file.read_bytes().replace(b"0.917", b"0.918"))
    with pytest.raises(NotInHistory, match="was changed"):
        load(of.hash, tmp_path / "policies")
