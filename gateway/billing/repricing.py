"""Repricing: corrects receipts whose price was wrong or missing, using the prices of a policy.

Receipts are never changed. Corrections are separate rows in a separate chain (`CHAIN`), so gateways can write to their
own chains at the same time. A correction contains the difference, so sums over receipts and corrections are right.
Repricing is idempotent.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import msgspec

from gateway.billing.ledger import Ledger
from gateway.billing.ledger.reader import TOKENS, Period, corrected_receipts
from gateway.billing.ledger.rows import Correction
from gateway.billing.ledger.unreadable import UnreadableRow
from gateway.billing.receipts import Bill, price_usage
from gateway.core.ids import new_event_id
from gateway.core.money import atoms_to_text, plain_text, text_to_atoms
from gateway.core.times import rfc3339_to_ns
from gateway.policy import Policy, Price
from gateway.types import Usage

CHAIN = "repricing"
ROWS_PER_FSYNC = 10_000

log = logging.getLogger(__name__)


class RepricingResult(msgspec.Struct):
    """Counts of receipts, and the sum of all corrections by currency, in atoms."""

    examined: int = 0
    corrected: int = 0
    unpriced: int = 0  # have no price, neither in the receipt nor in the policy
    other_currency: int = 0  # priced in another currency than the policy's, so no difference can be computed
    difference: dict[str, int] = msgspec.field(default_factory=dict)
    unreadable: list[UnreadableRow] = msgspec.field(default_factory=list)  # rows that were set aside
    failed: int = 0  # receipts that were read, but have a value that cannot be priced; the log names them


def find_corrections(
    ledger: Path, policy: Policy, period: Period, *, now: str, result: RepricingResult
) -> Iterator[Correction]:
    """Yield a correction for each receipt of the period whose cost differs by the policy. Counts them in `result`."""
    for row in corrected_receipts(ledger, period, set_aside=result.unreadable):
        result.examined += 1
        try:
            correction = _find_correction(policy, row, now, result)
        except (ValueError, ArithmeticError) as error:  # for example, its time is no time
            result.failed += 1
            log.warning("the receipt %s cannot be repriced: %s", row["event_id"], error)
            continue
        if correction is not None:
            yield correction


def _find_correction(policy: Policy, row: dict[str, Any], now: str, result: RepricingResult) -> Correction | None:
    if row["deployment"] is None and row["source"] != "cache":
        return None  # neither a deployment nor the response cache answered the call
    bill = reprice(policy, row)
    if bill is None or bill.cost is None or bill.price is None or bill.terms is None:
        result.unpriced += row["cost"] is None
        return None
    if row["currency"] not in (None, bill.terms.currency):
        result.other_currency += 1
        return None
    # `row` includes earlier corrections, so the difference is only what is still missing.
    before = None if row["cost"] is None else text_to_atoms(plain_text(row["cost"]))
    difference = bill.cost - (before or 0)
    if not difference and before is not None:
        return None
    result.corrected += 1
    currency = bill.terms.currency
    result.difference[currency] = result.difference.get(currency, 0) + difference
    return _correction(row, bill.price, currency, difference, now)


async def write_corrections(ledger: Path, policy: Policy, period: Period, *, now: str) -> RepricingResult:
    """Write all corrections of the period, and return when they are durable.

    Raises `UnreadableLedger`, or `LedgerUnavailable`, for example if another process is repricing.
    """
    result = RepricingResult()
    async with Ledger(ledger, CHAIN) as chain:
        for number, correction in enumerate(find_corrections(ledger, policy, period, now=now, result=result), start=1):
            chain.append(correction)
            if number % ROWS_PER_FSYNC == 0:
                await chain.durable(flush_now=True)
        await chain.durable(flush_now=True)
    return result


def reprice(policy: Policy, row: dict[str, Any]) -> Bill | None:
    """Price the usage of a receipt's row by a policy, as of the call's arrival. None if the policy has no price list.

    Raises `ValueError` or `ArithmeticError` for values that cannot be priced.
    """
    model = policy.find_model(row.get("model_routed") or row["model_asked"])
    if model is None:
        return None
    if row["source"] == "cache":
        prices = policy.cache_prices.get(model.name)
    else:
        prices = policy.prices_of(model.name, row["deployment"] or "", row.get("region"))
    if prices is None:
        return None
    return price_usage(
        policy, prices, usage_of_row(row), tenant=policy.priced_as(row["tenant"], row["parents"] or ()),
        model=model.name, class_name=row["latency_class"], service_tier=row["service_tier"],
        time_ns=rfc3339_to_ns(row["started"]),
    )  # fmt: skip


def usage_of_row(row: dict[str, Any]) -> Usage:
    """The usage that a receipt's row states."""
    tokens = {bucket: row[bucket] or 0 for bucket in TOKENS}
    stated = row.get("units") or {}
    quantities = msgspec.json.decode(stated) if isinstance(stated, str) else stated
    units = tuple((unit, int(Decimal(amount) * 1_000)) for unit, amount in quantities.items() if unit != "request")
    return msgspec.structs.replace(msgspec.convert(tokens, Usage), units=units)


def _correction(row: dict[str, Any], price: Price, currency: str, difference: int, now: str) -> Correction:
    receipt_fields = {name: value for name, value in row.items() if name in Correction.__struct_fields__}
    return Correction(
        **{
            **receipt_fields,
            **dict.fromkeys(TOKENS, 0),
            **price.receipt_fields,
            "event_id": new_event_id(),
            "corrects": row["event_id"],
            "reason": "repriced",
            "corrected": now,
            "price_version": price.version,
            "cost": atoms_to_text(difference),
            "currency": currency,
            "attempts": (),
            "units": {},
            "price_units": {},
            "list_cost": None,
        }
    )
