"""What a call reserves of a budget: the dearest price that it can meet, so that budgets hold."""

from __future__ import annotations

import asyncio
import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.billing.receipts import price_usage
from gateway.core.money import atoms_to_nanos
from gateway.core.times import rfc3339_to_ns
from gateway.limits.base import estimate_call
from gateway.policy import Policy
from gateway.types import Call, Usage
from tests.gateway.calls import a_call, chat
from tests.gateway.harness import a_rig, answer, counted, tenant
from tests.gateway.harness import chat as chat_body

NOW = rfc3339_to_ns("2026-11-20T10:00:00Z") / 1e9


def a_priced_policy(prices: list[dict[str, Any]], **changes: Any) -> Policy:
    return Policy.model_validate(
        {
            "deployments": [{"name": "a", "base_url": "http://a/v1", "model": "m", "price": prices}],
            "models": [{"name": "m", "deployments": ["a"], "max_output_tokens": 1_000}],
            "tenants": [{"name": "t"}],
            **changes,
        }
    )


def reserved(policy: Policy, *, class_name: str = "realtime", prompt: int = 0, **body: Any) -> int:
    call = a_call(chat(**body), policy)
    call = msgspec.structs.replace(call, class_name=class_name, prompt_tokens_estimate=prompt)
    return estimate_call(call, NOW).cost_nanos


def test_prices_that_cannot_apply_reserve_nothing() -> None:
    prices: list[dict[str, Any]] = [
        {"input": 0, "output": 900, "until": "2026-11-20"},
        {"input": 0, "output": 800, "class": "batch"},
        {"input": 0, "output": 700, "from": "2026-12-01"},
        {"input": 0, "output": 600, "above": 1_000},
        {"input": 0, "output": 1},
    ]
    policy = a_priced_policy(prices)
    assert reserved(policy, max_tokens=10) == 10 * 1_000
    assert reserved(policy, max_tokens=10, class_name="batch") == 10 * 800_000
    assert reserved(policy, max_tokens=10, prompt=501) == 10 * 600_000, "a prompt may be longer than its estimate"


def test_a_call_without_a_tier_may_be_served_in_any() -> None:
    policy = a_priced_policy(
        [{"input": 0, "output": 9, "service_tier": "priority"}, {"input": 0, "output": 2}], tenants=[{"name": "t"}]
    )
    assert reserved(policy, max_tokens=1) == reserved(policy, max_tokens=1, service_tier="priority") == 9_000
    assert reserved(policy, max_tokens=1, service_tier="default") == 2_000


def test_terms_count() -> None:
    policy = a_priced_policy(
        [{"input": 0, "output": 1}],
        tenants=[{"name": "t", "currency": "EUR", "pricing": [{"factor": "1.5", "reason": "markup"}]}],
        exchange_rates=[{"base": "USD", "quote": "EUR", "rate": "2"}],
    )
    assert reserved(policy, max_tokens=10) == 30_000


def test_a_call_without_max_tokens_reserves_what_the_model_can_generate() -> None:
    policy = a_priced_policy([{"input": 0, "output": 1}])
    assert reserved(policy) == 1_024_000, "at least the tenant's default"
    policy = a_priced_policy([{"input": 0, "output": 1}], models=[{"name": "m", "deployments": ["a"]}])
    assert reserved(policy) == 16_384_000


_PRICES = st.lists(
    st.fixed_dictionaries(
        {"input": st.integers(0, 50), "output": st.integers(0, 50)},
        optional={
            "above": st.sampled_from([10, 100, 1_000]), "service_tier": st.sampled_from(["flex", "priority"]),
            "class": st.just("batch"), "until": st.sampled_from(["2026-11-20", "2026-12-01"]),
            "request": st.integers(0, 3), "cached_input": st.integers(0, 50), "reasoning": st.integers(0, 50),
        },
    ),
    min_size=1, max_size=5,
)  # fmt: skip


@given(
    prices=_PRICES, asked=st.sampled_from([None, "auto", "flex", "priority", "default"]),
    class_name=st.sampled_from(["realtime", "batch"]), granted=st.booleans(), prompt=st.integers(0, 1_500),
    cached=st.integers(0, 1_500), output=st.integers(0, 1_000), reasoning=st.integers(0, 1_000),
)  # fmt: skip
def test_no_bill_is_above_the_reservation(
    prices: list[dict[str, Any]], asked: str | None, class_name: str, granted: bool, prompt: int, cached: int,
    output: int, reasoning: int,
) -> None:  # fmt: skip
    tiers = ["flex"] if granted else []
    policy = a_priced_policy(prices, tenants=[{"name": "t", "service_tiers": tiers}])
    body = {} if asked is None else {"service_tier": asked}
    held = reserved(policy, class_name=class_name, prompt=prompt, max_tokens=1_000, **body)
    cached, reasoning = min(cached, prompt), min(reasoning, output)
    usage = Usage(prompt - cached, cached, output=output, reasoning=reasoning)
    for replied in {asked, None, *(("flex", "priority") if asked in (None, "auto") else ())}:
        bill = price_usage(
            policy, policy.price_lists["m", "a"], usage, tenant="t", model="m", class_name=class_name,
            service_tier=replied, time_ns=int(NOW * 1e9),
        )  # fmt: skip
        assert atoms_to_nanos(bill.cost or 0) <= held


async def test_sixty_parallel_calls_never_spend_more_than_the_budget(tmp_path: Path) -> None:
    output = 80_000  # 0.16 each, at 2 per million
    models = [{"name": "m", "deployments": ["a", "b"], "max_output_tokens": output}]
    async with a_rig(tmp_path, models=models, tenants=[tenant(budget={"amount": "0.50"})]) as rig:
        rig.script(answer(usage=counted(10, output)))
        replies = await asyncio.gather(*(rig.ask(chat_body()) for _ in range(60)))
        await rig.components.settler.stop()
        assert {reply.status for reply in replies} == {200, 429}
        spent = sum(Decimal(receipt["cost"]) for receipt in rig.receipts())
        assert Decimal("0.16") < spent <= Decimal("0.50")


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
def test_the_policy_can_cap_calls_without_a_bound(field: str) -> None:
    limits = {"cap_output": field, "default_output_tokens": 77}
    policy = a_priced_policy([{"input": 0, "output": 1}], tenants=[{"name": "t", "limits": limits}])
    capped: Call = a_call(chat(), policy)
    assert json.loads(bytes(capped.fields[field])) == 77 and capped.max_output_tokens == 77
    assert estimate_call(capped, NOW).cost_nanos == 77_000
    assert field not in a_call(chat(max_tokens=5), policy).fields or field == "max_tokens"
    assert a_call(chat(max_tokens=5, n=2), policy).max_output_tokens == 10
