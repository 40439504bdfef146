"""LiteLLM's price file becomes prices of a policy, to the last decimal."""

from __future__ import annotations

import json
from decimal import Decimal
from typing import Any

import pytest

from gateway.policy.litellm_prices import UnreadablePrices, as_policy, prices_of, read_file
from gateway.policy.prices import Price, PriceList

# In the form of the public file, with numbers of our own.
LONG = {
    "input_cost_per_token": 3e-06, "output_cost_per_token": 1.5e-05, "cache_read_input_token_cost": 3e-07,
    "cache_creation_input_token_cost": 3.75e-06, "cache_creation_input_token_cost_above_1hr": 6e-06,
    "input_cost_per_token_above_200k_tokens": 6e-06, "output_cost_per_token_above_200k_tokens": 2.25e-05,
    "search_context_cost_per_query": {"search_context_size_medium": 0.01}, "max_input_tokens": 1000000,
    "litellm_provider": "example", "mode": "chat", "file_search_cost_per_1k_calls": 0.0025,
}  # fmt: skip
TIERED = {
    "input_cost_per_token": 1.25e-06, "output_cost_per_token": 1e-05, "input_cost_per_token_flex": 6.25e-07,
    "output_cost_per_token_flex": 5e-06, "input_cost_per_token_priority": 2.5e-06,
    "input_cost_per_token_batches": 6.25e-07, "output_cost_per_token_batches": 5e-06,
}  # fmt: skip


def entries(**models: Any) -> Any:
    return read_file(json.dumps({"sample_spec": {"input_cost_per_token": 0}, **models}).encode())


def test_context_steps_and_units_are_imported() -> None:
    prices, ignored = prices_of(entries(m=LONG)["m"], version="v")
    assert ignored == ["file_search_cost_per_1k_calls"]
    assert [(price.above, price.input, price.output) for price in prices] == [
        (200_000, Decimal(6), Decimal("22.5")), (None, Decimal(3), Decimal(15)),
    ]  # fmt: skip
    assert all((price.cached_input, price.cache_write_1h, price.search) == (Decimal("0.3"), Decimal(6), Decimal("0.01"))
               for price in prices)  # fmt: skip
    listed = PriceList(prices)
    assert [listed.price("realtime", None, 0, input_tokens=n) for n in (200_000, 200_001)] == [*reversed(prices)]


def test_tiers_and_batches_come_before_the_price_of_all_calls() -> None:
    prices, ignored = prices_of(entries(m=TIERED)["m"])
    assert ignored == []
    conditions = [(price.service_tier, price.latency_class, price.input, price.output) for price in prices]
    assert conditions == [
        (("flex",), None, Decimal("0.625"), Decimal(5)), (("priority",), None, Decimal("2.5"), Decimal(10)),
        (None, ("batch",), Decimal("0.625"), Decimal(5)), (None, None, Decimal("1.25"), Decimal(10)),
    ]  # fmt: skip


def test_what_is_printed_is_the_same_price() -> None:
    for entry in (LONG, TIERED):
        prices, _ = prices_of(entries(m=entry)["m"], version="2026-12")
        assert [Price.model_validate(each) for each in as_policy(prices)] == prices


@pytest.mark.parametrize("content", [b"{", b"[]", b'{"m": 3}'])
def test_another_file_is_refused(content: bytes) -> None:
    with pytest.raises(UnreadablePrices):
        read_file(content)


def test_a_price_with_too_many_decimals_is_refused_and_not_rounded() -> None:
    with pytest.raises(UnreadablePrices, match="input_cost_per_token"):
        prices_of(entries(m={"input_cost_per_token": 1.2345678901234e-9})["m"])
