"""Exports the ledger as OpenMeter's events, one CloudEvent 1.0 per receipt (openmeter.io/docs, "Usage events").

The id of an event is the receipt's event id. OpenMeter counts each pair of source and id once within its deduplication
window. `gateway.billing.ledger.stripe_state` remembers what was exported, so that no later export has an event again. A
correction that adds tokens is a separate event at the time of the call. A correction that subtracts tokens is not
exported, as to Stripe: give the tenant a credit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from gateway.billing.ledger.reader import EVERYTHING, TOKENS, Period, SetAside, bill_rows
from gateway.core.money import plain_text


def usage_events(
    ledger: Path,
    *,
    event_type: str,
    source: str,
    subjects: Mapping[str, str],
    period: Period = EVERYTHING,
    set_aside: SetAside = None,
) -> Iterator[dict[str, Any]]:
    """Yield the events of a period as JSON objects. Raises `UnreadableLedger`.

    `subjects` maps tenants to OpenMeter's subjects; without an entry, the subject is the tenant. `data` has the tokens
    of each kind, and `total`, which is the sum of input and output: a meter sums `total`.
    """
    for row in bill_rows(ledger, period, set_aside=set_aside):
        tokens = {name: row[name] or 0 for name in TOKENS}
        total = sum(tokens[name] for name in ("input_uncached", "cache_read", "cache_write", "output"))
        if total <= 0 or row["source"] == "cache":
            continue
        yield {
            "specversion": "1.0",
            "type": event_type,
            "id": row["event_id"],
            "time": row["finished"],
            "source": source,
            "subject": subjects.get(row["tenant"], row["tenant"]),
            "data": {
                "total": total, **tokens, "model": row["model_asked"], "key": row["key_id"],
                "operation": row["operation"], "cost": None if row["cost"] is None else plain_text(row["cost"]),
                "currency": row["currency"],
            },
        }  # fmt: skip
