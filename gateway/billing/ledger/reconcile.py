"""Reconciliation: compares the ledger with the engines' own counters (`gateway.billing.ledger.engine_counters`).

If a call is in flight when a sample is taken, its engine counts a part of its tokens in each of the two intervals. The
ledger counts all of its tokens in the interval in which it ends. A single interval may therefore differ by the calls in
flight. The sum over all intervals does not.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from gateway.billing.ledger.engine_counters import CounterInterval
from gateway.billing.ledger.tables import connect
from gateway.billing.ledger.unreadable import UnreadableRow

_BILLED_OR_NOT = ("kind <> 'unbilled'", "kind = 'unbilled'")


class Comparison(msgspec.Struct, frozen=True):
    """One interval of an engine's counters, and the ledger's tokens of the calls that ended in the interval.

    `input` and `output` are billed tokens. `unbilled_input` and `unbilled_output` are tokens of attempts that are never
    billed. The drift is the engine's count less both. A positive drift is work that is missing from the ledger.
    """

    interval: CounterInterval
    input: int
    output: int
    unbilled_input: int = 0
    unbilled_output: int = 0

    @property
    def input_drift(self) -> int:
        return self.interval.input - self.input - self.unbilled_input

    @property
    def output_drift(self) -> int:
        return self.interval.output - self.output - self.unbilled_output


def drift_ratio(drift: int, counted: int) -> float:
    """Return the drift as a share of the engine's count. 1 if the engine counted nothing but there is drift."""
    return abs(drift) / counted if counted else float(bool(drift))


def compare(
    ledger: Path, intervals: Sequence[CounterInterval], *, set_aside: list[UnreadableRow] | None = None
) -> list[Comparison]:
    """Compare each interval with the ledger. Raises `UnreadableLedger`."""
    if not intervals:
        return []
    with connect(ledger, set_aside=set_aside) as connection:
        connection.execute("CREATE TABLE spans (number INTEGER, deployment VARCHAR, since VARCHAR, until VARCHAR)")
        connection.executemany(
            "INSERT INTO spans VALUES (?, ?, ?, ?)",
            [
                (number, interval.deployment, interval.since, interval.until)
                for number, interval in enumerate(intervals)
            ],
        )
        tokens = ("input_uncached + cache_read + cache_write", "output")
        sums = [f"coalesce(sum({of}) FILTER ({which}), 0)" for which in _BILLED_OR_NOT for of in tokens]
        found = connection.execute(
            f"SELECT number, {', '.join(sums)} FROM work JOIN spans ON work.deployment = spans.deployment "
            "AND finished >= since AND finished < spans.until "
            "WHERE source IS DISTINCT FROM 'cache' GROUP BY number"
        ).fetchall()
    counts = {number: [int(count) for count in row] for number, *row in found}
    return [Comparison(interval, *counts.get(number, (0, 0))) for number, interval in enumerate(intervals)]


def totals_by_deployment(comparisons: Sequence[Comparison]) -> list[Comparison]:
    """Return one comparison per deployment, summed over all of its intervals."""
    found: dict[str, Comparison] = {}
    for one in comparisons:
        before = found.get(one.interval.deployment)
        if before is None:
            found[one.interval.deployment] = one
            continue
        interval = msgspec.structs.replace(
            before.interval,
            until=one.interval.until,
            input=before.interval.input + one.interval.input,
            output=before.interval.output + one.interval.output,
            restarted=before.interval.restarted or one.interval.restarted,
        )
        found[one.interval.deployment] = Comparison(
            interval,
            before.input + one.input,
            before.output + one.output,
            before.unbilled_input + one.unbilled_input,
            before.unbilled_output + one.unbilled_output,
        )
    return list(found.values())
