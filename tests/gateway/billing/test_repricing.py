"""Corrections of receipts whose price was wrong or missing."""

from __future__ import annotations

from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from gateway.billing.ledger import Ledger, verify
from gateway.billing.ledger.reader import EVERYTHING, Period, summarise
from gateway.billing.repricing import CHAIN, write_corrections
from gateway.core.errors import LedgerUnavailable
from gateway.core.money import atoms_to_text
from gateway.policy import Policy
from tests.gateway.billing.ledger.receipts import a_receipt, write_chain

NOW = "2026-12-01T00:00:00.000000Z"
COUNTS = {"input_uncached": 1_000_000, "cache_read": 2_000_000, "cache_write": 0, "output": 3_000_000, "reasoning": 0}
UNPRICED = {
    "cost": None, "currency": None, "price_version": None,
    "price_input": None, "price_cached_input": None, "price_output": None,
}  # fmt: skip


def policy(*prices: dict[str, Any], **model: Any) -> Policy:
    deployment = {"name": "h200-a", "base_url": "http://a/v1", "model": "qwen3-32b", "price": list(prices)}
    models = [{"name": "qwen3", "aliases": ["gpt-4o"], "deployments": ["h200-a"], **model}]
    return Policy.model_validate(
        {"deployments": [deployment], "models": models, "tenants": [{"name": "acme", "service_tiers": ["flex"]}]}
    )


async def test_an_unpriced_receipt_gets_a_price(tmp_path: Path) -> None:
    write_chain(tmp_path / "replica", [a_receipt(**COUNTS, **UNPRICED)])
    assert summarise(tmp_path)[0].unpriced == 1
    found = await write_corrections(
        tmp_path, policy({"input": 1, "cached_input": "0.5", "output": 10}), EVERYTHING, now=NOW
    )
    assert (found.examined, found.corrected, found.difference) == (1, 1, {"USD": 32 * 10**15})
    (line,) = summarise(tmp_path)
    assert (line.unpriced, line.requests, line.cost, line.saved) == (0, 1, {"USD": Decimal(32)}, {"USD": Decimal(1)})


async def test_a_wrong_price_is_corrected_once(tmp_path: Path) -> None:
    write_chain(tmp_path / "replica", [a_receipt(**COUNTS, cost="40")])
    right = policy({"input": 1, "output": 10})
    assert atoms_to_text((await write_corrections(tmp_path, right, EVERYTHING, now=NOW)).difference["USD"]) == "-7"
    assert (await write_corrections(tmp_path, right, EVERYTHING, now=NOW)).corrected == 0
    assert (
        atoms_to_text((await write_corrections(tmp_path, policy({"input": 1}), EVERYTHING, now=NOW)).difference["USD"])
        == "-30"
    )
    assert summarise(tmp_path)[0].cost == {"USD": Decimal(3)}
    assert verify(tmp_path).broken is None and set(verify(tmp_path).heads) == {"replica", CHAIN}


async def test_the_price_is_selected_by_class_tier_and_time(tmp_path: Path) -> None:
    rows = [
        a_receipt(**COUNTS, cost="0", latency_class="batch"),
        a_receipt(**COUNTS, cost="0", service_tier="flex"),
        a_receipt(**COUNTS, cost="0", started="2026-11-19T23:59:59.999999Z"),
        a_receipt(**COUNTS, cost="0"),
    ]
    write_chain(tmp_path / "replica", rows)
    prices = policy(
        {"input": 0, "output": 1, "class": "batch"},
        {"input": 0, "output": 2, "service_tier": "flex"},
        {"input": 0, "output": 3, "until": "2026-11-20"},
        {"input": 0, "output": 4, "from": "2026-11-20"},
    )
    found = await write_corrections(tmp_path, prices, EVERYTHING, now=NOW)
    assert found.difference == {"USD": 3 * (1 + 2 + 3 + 4) * 10**15}


async def test_receipts_without_a_comparable_price_stay_as_they_are(tmp_path: Path) -> None:
    rows = [
        a_receipt(**COUNTS, cost="5", currency="EUR"),
        a_receipt(**COUNTS, **UNPRICED, model_asked="removed"),
        a_receipt(**COUNTS, **UNPRICED, deployment="removed"),
        a_receipt(deployment=None, outcome="refused", source="estimate", **{**UNPRICED, "cost": "0"}),
        a_receipt(deployment=None, source="cache", **{**UNPRICED, "cost": "0"}),
    ]
    write_chain(tmp_path / "replica", rows)
    found = await write_corrections(tmp_path, policy({"input": 1}), EVERYTHING, now=NOW)
    assert (found.corrected, found.other_currency, found.unpriced) == (0, 1, 2)


async def test_answers_from_the_cache_have_their_own_price(tmp_path: Path) -> None:
    write_chain(
        tmp_path / "replica", [a_receipt(**COUNTS, deployment=None, source="cache", **{**UNPRICED, "cost": "0"})]
    )
    await write_corrections(
        tmp_path, policy({"input": 9}, cache_price={"input": 1, "cached_input": 0}), EVERYTHING, now=NOW
    )
    assert summarise(tmp_path)[0].cost == {"USD": Decimal(1)}


async def test_only_calls_of_the_period_and_filter_are_repriced(tmp_path: Path) -> None:
    rows = [a_receipt(**COUNTS, **UNPRICED, tenant=tenant) for tenant in ("a", "b")]
    write_chain(tmp_path / "replica", rows)
    found = await write_corrections(tmp_path, policy({"input": 1}), Period(only={"tenant": ["a"]}), now=NOW)
    assert (found.examined, found.corrected) == (1, 1)


async def test_two_processes_cannot_reprice_at_once(tmp_path: Path) -> None:
    write_chain(tmp_path / "replica", [a_receipt()])
    async with Ledger(tmp_path, CHAIN):
        with pytest.raises(LedgerUnavailable):
            await write_corrections(tmp_path, policy({"input": 1}), EVERYTHING, now=NOW)


async def test_rows_that_cannot_be_repriced_hold_up_no_other_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    no_time, good = a_receipt(**COUNTS, cost="40", started="some day"), a_receipt(**COUNTS, cost="40")
    write_chain(tmp_path / "replica", [no_time, a_receipt(output=2**64 - 1), good])
    found = await write_corrections(tmp_path, policy({"input": 1, "output": 10}), EVERYTHING, now=NOW)
    assert (found.corrected, found.failed + len(found.unreadable)) == (1, 2)
    assert [(row.file.name, row.line) for row in found.unreadable] == [
        ("0000000001.jsonl", 1),
        ("0000000001.jsonl", 2),
    ]


async def test_a_receipt_with_a_time_that_is_none_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    no_time, good = a_receipt(**COUNTS, cost="40", started="some day"), a_receipt(**COUNTS, cost="40")
    write_chain(tmp_path / "replica", [no_time, good])
    found = await write_corrections(tmp_path, policy({"input": 1, "output": 10}), EVERYTHING, now=NOW)
    assert (found.corrected, found.failed, found.unreadable) == (1, 1, [])
    assert f"the receipt {no_time.event_id} cannot be repriced" in caplog.text
