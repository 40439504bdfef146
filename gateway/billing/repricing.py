"""Corrections where prices were wrong, or missing: what receipts should have said by the prices of a policy.

The rows that are there stay. What is written are corrections, into a chain of their own (`CHAIN`), so that the gateways
may go on writing theirs; and each is a difference, so that sums of both are right. Doing it again changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from gateway.billing.ledger import Ledger
from gateway.billing.ledger.reader import TOKENS, Period, corrected_receipts
from gateway.billing.ledger.rows import Correction
from gateway.billing.receipts import cost_of
from gateway.core.ids import new_event_id
from gateway.core.money import atoms_to_text, plain_text, text_to_atoms
from gateway.core.times import rfc3339_to_ns
from gateway.policy import Policy, Price
from gateway.types import Usage

CHAIN = "repricing"
ROWS_PER_FSYNC = 10_000


class RepricingResult(msgspec.Struct):
    """What was found and done. Money in atoms, by currency."""

    looked_at: int = 0
    corrected: int = 0
    unpriced: int = 0  # the policy has no price for them
    other_currency: int = 0  # priced in another currency than the policy's: a difference can not be told
    difference: dict[str, int] = msgspec.field(default_factory=dict)


def find_corrections(
    ledger: Path, policy: Policy, period: Period, *, now: str, found: RepricingResult
) -> Iterator[Correction]:
    """One for each receipt of the period whose cost is not what the policy says; counted in `found`."""
    for row in corrected_receipts(ledger, period):
        found.looked_at += 1
        if row["deployment"] is None and row["source"] != "cache":
            continue  # nobody worked for it
        price = _price(policy, row)
        if price is None:
            found.unpriced += row["cost"] is None
            continue
        if row["currency"] not in (None, price.currency):
            found.other_currency += 1
            continue
        usage = msgspec.convert({bucket: row[bucket] for bucket in TOKENS}, Usage)
        before = None if row["cost"] is None else text_to_atoms(plain_text(row["cost"]))
        difference = cost_of(usage, price) - (before or 0)
        if difference or before is None:
            found.corrected += 1
            found.difference[price.currency] = found.difference.get(price.currency, 0) + difference
            yield _correction(row, price, difference, now)


async def write_corrections(ledger: Path, policy: Policy, period: Period, *, now: str) -> RepricingResult:
    """Raises `UnreadableLedger` and `LedgerUnavailable`: somebody else may be repricing."""
    found = RepricingResult()
    async with Ledger(ledger, CHAIN) as chain:
        for number, correction in enumerate(find_corrections(ledger, policy, period, now=now, found=found), start=1):
            chain.append(correction)
            if number % ROWS_PER_FSYNC == 0:
                await chain.durable(flush_now=True)
        await chain.durable(flush_now=True)
    return found


def _price(policy: Policy, row: dict[str, Any]) -> Price | None:
    """The one that held when the call arrived."""
    model = policy.models_by_name.get(row["model_asked"])
    if model is None:
        return None
    if row["source"] == "cache":
        prices = policy.cache_prices.get(model.name)
    else:
        prices = policy.price_lists.get((model.name, row["deployment"]))
    if prices is None:
        return None
    return prices.price(row["latency_class"], row["service_tier"], rfc3339_to_ns(row["started"]))


def _correction(row: dict[str, Any], price: Price, difference: int, now: str) -> Correction:
    same = {name: value for name, value in row.items() if name in Correction.__struct_fields__}
    return Correction(
        **{
            **same,
            **dict.fromkeys(TOKENS, 0),
            **price.receipt_fields,
            "event_id": new_event_id(),
            "corrects": row["event_id"],
            "reason": "repriced",
            "corrected": now,
            "price_version": price.version,
            "cost": atoms_to_text(difference),
            "currency": price.currency,
            "attempts": (),
        }
    )
