"""Sums what was spent, as budgets count it: by the time when a call was admitted, and without later corrections."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec

from gateway.billing.ledger.tables import connect

_FETCH_ROWS = 10_000


class SpentLine(msgspec.Struct, frozen=True):
    """The cost of all calls that are equal in everything that selects budgets. `hour` is as in 2026-11-20T08."""

    tenant: str
    key_id: str
    end_user: str | None
    model_asked: str
    model_routed: str | None
    latency_class: str
    hour: str
    nanos: int  # the sum of the costs, each rounded up as a budget does


def spent(ledger: Path) -> Iterator[SpentLine]:
    """Yield what all calls have cost. Raises `UnreadableLedger`."""
    with connect(ledger) as tables:
        found = tables.execute(
            "SELECT tenant, key_id, end_user, model_asked, model_routed, latency_class, started[:13],"
            " sum(ceil(cost::DECIMAL(27, 15) * 1000000000::DECIMAL(10, 0)))::HUGEINT"
            " FROM receipts WHERE cost > 0 GROUP BY ALL ORDER BY ALL"
        )
        while rows := found.fetchmany(_FETCH_ROWS):
            for row in rows:
                yield SpentLine(*row)
