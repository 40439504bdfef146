"""Exports the ledger as Stripe's meter events, one per receipt (docs.stripe.com/api/v2/billing/meter-event).

The identifier of an event is the receipt's event id. Stripe counts an identifier once within 24 hours, and then forgets
it, so `gateway.billing.ledger.stripe_state` remembers what was exported. Stripe accepts events of the last 35 days. A
correction that adds tokens is a separate event at the time of the call. A correction that subtracts tokens cannot be
exported, since a meter only counts up.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from gateway.billing.ledger.reader import EVERYTHING, TOKENS, Period, SetAside, bill_rows

VALUES = ("total", *TOKENS)


class NoStripeCustomer(Exception):
    """A tenant has no Stripe customer id. The message names the tenant."""


def meter_events(
    ledger: Path,
    *,
    event_name: str,
    customers: Mapping[str, str],
    value: str = "total",
    period: Period = EVERYTHING,
    set_aside: SetAside = None,
) -> Iterator[dict[str, Any]]:
    """Yield the meter events of a period as JSON objects.

    `customers` maps tenants to Stripe's customer ids. A tenant whose name is such an id (`cus_...`) needs no entry.
    `value` is one of `VALUES` and selects which tokens are counted. Raises `NoStripeCustomer` and `UnreadableLedger`.
    """
    for row in bill_rows(ledger, period, set_aside=set_aside):
        tokens = _total(row) if value == "total" else row[value] or 0
        if tokens <= 0 or row["source"] == "cache":
            continue
        tenant = row["tenant"]
        customer = customers.get(tenant, tenant if tenant.startswith("cus_") else None)
        if customer is None:
            raise NoStripeCustomer(f"the tenant {tenant!r} has no Stripe customer: --customer {tenant}=cus_...")
        yield {
            "event_name": event_name,
            "identifier": row["event_id"],
            "timestamp": row["finished"],
            "payload": {"stripe_customer_id": customer, "value": str(tokens)},
        }


def _total(row: Mapping[str, Any]) -> int:
    return sum(row[name] or 0 for name in ("input_uncached", "cache_read", "cache_write", "output"))
