"""Reads and sums the ledger with DuckDB. Every number is computed from the rows alone. Money stays decimal throughout.

A call counts at the time when it ended and its receipt was written. A correction counts on the day of the call that it
corrects. The sums of a past day therefore change only by corrections. The tokens of answers from the response cache are
not summed, since no engine computed them. `cache_hits` counts these calls.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any, NamedTuple

from gateway.billing.ledger.rows import complete_receipt
from gateway.billing.ledger.tables import COLUMNS, UnreadableLedger, connect
from gateway.billing.ledger.unreadable import UnreadableRow
from gateway.core.money import plain_text

DIMENSIONS = {
    "tenant": "tenant",
    "organisation": "coalesce(parents[1], tenant)",
    "key": "key_id",
    "user": "end_user",
    "model": "model_asked",
    "class": "latency_class",
    "tier": "service_tier",
    "month": "finished[:7]",
    "week": "strftime(finished[:10]::DATE, '%G-W%V')",
    "day": "finished[:10]",
    "hour": "finished[:13] || ':00'",
    "minute": "finished[:16]",
    "deployment": "deployment",
    "operation": "operation",
    "outcome": "outcome",
    "batch": "if(latency_class = 'batch', 'true', 'false')",
}
# The dimensions of time in another time zone, as formats of the local time. The hour that a clock repeats is one line.
_LOCAL_TIMES = {
    "month": "%Y-%m", "week": "%G-W%V", "day": "%Y-%m-%d", "hour": "%Y-%m-%dT%H:00", "minute": "%Y-%m-%dT%H:%M"
}  # fmt: skip
TOKENS = (
    "input_uncached", "cache_read", "cache_write", "output", "reasoning", "audio_input", "audio_output",
    "cache_write_1h", "remainder",
)  # fmt: skip

SetAside = list[UnreadableRow] | None
_MILLIONTH = "0.000001::DECIMAL(7, 6)"  # prices are per million tokens
_PRICE = "DECIMAL(18, 9)"  # few enough digits that its product with a token count fits into 38 digits
_FETCH_ROWS = 10_000

_PRICED_BY = ("price_input", "price_cached_input", "currency")
# The current prices of corrected receipts: those of the last correction.
_PRICES_NOW = """
    SELECT corrects, bool_or(cost IS NOT NULL) AS priced, last(price_input ORDER BY corrected) AS price_input,
           last(price_cached_input ORDER BY corrected) AS price_cached_input,
           last(currency ORDER BY corrected) AS currency
    FROM corrections GROUP BY corrects
"""


class UsageLine(NamedTuple):
    """The usage of one group of calls. `group` maps dimensions to values; `cost` and `saved` are by currency.

    `saved` is the additional cost that the calls would have had without prefix cache hits. `inexact` is the number of
    calls whose usage is an estimate. `unpriced` is the number of calls that have no price, so `cost` excludes them.
    """

    group: dict[str, str | None]
    requests: int
    cache_hits: int
    input_uncached: int
    cache_read: int
    cache_write: int
    output: int
    reasoning: int
    audio_input: int
    audio_output: int
    cache_write_1h: int
    remainder: int
    inexact: int
    unpriced: int
    cost: dict[str, Decimal]
    saved: dict[str, Decimal]

    @property
    def cached_share(self) -> float:
        """The share of all input tokens that were read from a prefix cache."""
        return self.cache_read / ((self.input_uncached + self.cache_read + self.cache_write) or 1)


class UnitLine(NamedTuple):
    """How much of one unit that is no token, as images, a group of calls was billed for. Without corrections."""

    group: dict[str, str | None]
    requests: int
    quantity: Decimal


class UnbilledLine(NamedTuple):
    """Unbilled attempts at one deployment that ended in one way. No tenant pays for them; their vendor may bill them.

    `outcome` is None if it is unknown, because a gateway died. `inexact` is the number of estimates. `cost` is
    by currency, at list prices. `unpriced` is the number of attempts with tokens but without a known price.
    """

    deployment: str
    outcome: str | None
    attempts: int
    input: int
    output: int
    inexact: int
    unpriced: int
    cost: dict[str, Decimal]


class Period(NamedTuple):
    """Selects the calls that ended from `since` (inclusive) to `until` (exclusive), RFC 3339 texts as in receipts.

    `only` restricts the selection further: it maps dimensions to the selected values.
    """

    since: str | None = None
    until: str | None = None
    only: Mapping[str, Sequence[str]] = {}

    @property
    def condition(self) -> str:
        """The SQL condition on `bills` that selects these calls."""
        conditions = ["($since IS NULL OR finished >= $since)", "($until IS NULL OR finished < $until)"]
        conditions += [f"list_contains($only_{name}, {DIMENSIONS[name]})" for name in self.only]
        return " AND ".join(conditions)

    @property
    def parameters(self) -> dict[str, Any]:
        """The named parameters of `condition`."""
        only = {f"only_{name}": list(values) for name, values in self.only.items()}
        return {"since": self.since, "until": self.until, **only}


EVERYTHING = Period()


def summarise(
    ledger: Path,
    *,
    by: Sequence[str] = (),
    period: Period = EVERYTHING,
    zone: str = "UTC",
    threads: int | None = None,
    set_aside: SetAside = None,
) -> list[UsageLine]:
    """Sum the calls of a period by the dimensions `by` (keys of `DIMENSIONS`). Returns one line per group, sorted.

    `zone` is the time zone (IANA) of months, weeks (ISO 8601), days, hours and minutes. `set_aside` is that of
    `connect`, here and in the functions below. Raises `UnreadableLedger`.
    """
    dimensions = [f"{_expression(name, zone)} AS dimension_{name}" for name in by]
    with connect(ledger, threads=threads, set_aside=set_aside) as connection:
        # Most periods have no correction. A correction has the time of its receipt, so it is in the same period.
        found = connection.execute(_summary(dimensions, period, corrected=False), period.parameters).fetchall()
        if any(row[len(by) + 1] for row in found):
            connection.load_corrections()
            found = connection.execute(_summary(dimensions, period, corrected=True), period.parameters).fetchall()
    lines: dict[tuple[str | None, ...], UsageLine] = {}
    for row in found:
        group, currency, counts, cost, saved = row[: len(by)], row[len(by)], row[len(by) + 2 : -2], row[-2], row[-1]
        line = lines.get(group)
        if line is None:
            line = lines[group] = UsageLine._make([dict(zip(by, group, strict=True)), *counts, {}, {}])
        else:  # the group already has a line, for another currency
            sums = [before + more for before, more in zip(line[1:-2], counts, strict=True)]
            line = lines[group] = UsageLine._make([line.group, *sums, line.cost, line.saved])
        if currency is not None:
            line.cost[currency], line.saved[currency] = cost, saved
    return [lines[group] for group in sorted(lines, key=lambda group: [value or "" for value in group])]


def _expression(dimension: str, zone: str) -> str:
    """Return the SQL expression of a dimension."""
    if zone == "UTC" or dimension not in _LOCAL_TIMES:
        return DIMENSIONS[dimension]
    name = zone.replace("'", "''")
    return f"strftime(finished::TIMESTAMPTZ AT TIME ZONE '{name}', '{_LOCAL_TIMES[dimension]}')"


def latest_receipts(ledger: Path, count: int, *, set_aside: SetAside = None) -> list[dict[str, Any]]:
    """Return the newest receipts, complete, newest first. Raises `UnreadableLedger`."""
    with connect(ledger, set_aside=set_aside) as connection:
        order = "ORDER BY finished DESC, event_id DESC LIMIT $n"
        found = connection.execute(f"SELECT {', '.join(COLUMNS)} FROM receipts {order}", {"n": count}).fetchall()
    rows = [dict(zip(COLUMNS, row, strict=True)) for row in found]
    return [
        complete_receipt(
            {
                **row,
                "cost": None if row["cost"] is None else plain_text(row["cost"]),
                "attempts": json.loads(row["attempts"] or "[]"),
            }
        )
        for row in rows
    ]


def bill_rows(ledger: Path, period: Period = EVERYTHING, *, set_aside: SetAside = None) -> Iterator[dict[str, Any]]:
    """Yield receipts and corrections as dicts of their columns, in order of event id. `cost` is a `Decimal`.

    Raises `UnreadableLedger`.
    """
    names = ["kind", *(name for name in COLUMNS if name != "attempts"), "corrects"]
    sql = f"SELECT {', '.join(names)} FROM bills WHERE {period.condition} ORDER BY event_id"
    with connect(ledger, set_aside=set_aside) as connection:
        cursor = connection.execute(sql, period.parameters)
        while rows := cursor.fetchmany(_FETCH_ROWS):
            for row in rows:
                yield dict(zip(names, row, strict=True))


def corrected_receipts(
    ledger: Path, period: Period = EVERYTHING, *, set_aside: SetAside = None
) -> Iterator[dict[str, Any]]:
    """Yield receipts with their corrections added, as dicts of their columns, in order of event id.

    `cost` is a `Decimal`. All rows are read before the first one is yielded. Raises `UnreadableLedger`.
    """
    summed = ("cost", *TOKENS)
    now = [f"coalesce(receipts.{name}, 0) + coalesce(changes.{name}, 0) AS {name}" for name in TOKENS]
    now.append("coalesce(receipts.cost + changes.cost, receipts.cost, changes.cost) AS cost")
    now.append("coalesce(receipts.currency, changes.currency) AS currency")
    names = [name for name in COLUMNS if name not in ("attempts", "currency", *summed)]
    sums = ", ".join(f"sum({name}) AS {name}" for name in summed)
    with connect(ledger, set_aside=set_aside) as connection:
        connection.load_corrections()
        rows = connection.execute(
            f"SELECT {', '.join(f'receipts.{name}' for name in names)}, {', '.join(now)} FROM receipts LEFT JOIN "
            f"(SELECT corrects, last(currency ORDER BY corrected) AS currency, {sums} FROM corrections GROUP BY ALL) "
            f"AS changes ON receipts.event_id = changes.corrects WHERE {period.condition} ORDER BY receipts.event_id",
            period.parameters,
        )
        columns = [*names, *TOKENS, "cost", "currency"]
        while some := rows.fetchmany(_FETCH_ROWS):
            for row in some:
                yield dict(zip(columns, row, strict=True))


def write_parquet(ledger: Path, file: Path, period: Period = EVERYTHING, *, set_aside: SetAside = None) -> int:
    """Write receipts and corrections to a Parquet file. Returns the number of rows. Raises `UnreadableLedger`."""
    rows = f"SELECT * EXCLUDE (attempts) FROM bills WHERE {period.condition} ORDER BY event_id"
    with connect(ledger, set_aside=set_aside) as connection:
        target = str(file).replace("'", "''")
        written = connection.execute(f"COPY ({rows}) TO '{target}' (FORMAT parquet)", period.parameters).fetchone()
    return int(written[0]) if written else 0


def unpriced_calls(
    ledger: Path, period: Period = EVERYTHING, *, set_aside: SetAside = None
) -> list[tuple[str, str | None, int]]:
    """Return (model, deployment, number of calls) for the calls without a price. Raises `UnreadableLedger`."""
    with connect(ledger, set_aside=set_aside) as connection:
        connection.load_corrections()
        return connection.execute(
            f"SELECT model_asked, deployment, count(*) FROM receipts ANTI JOIN ({_PRICES_NOW}) AS now "
            f"ON event_id = now.corrects AND now.priced WHERE cost IS NULL AND {period.condition} "
            "GROUP BY ALL ORDER BY ALL",
            period.parameters,
        ).fetchall()


def sum_unit(
    ledger: Path,
    unit: str,
    *,
    by: Sequence[str],
    period: Period,
    threads: int | None = None,
    set_aside: SetAside = None,
) -> list[UnitLine]:
    """Sum the calls of a period and their quantity of a unit (`gateway.policy.prices.UNITS`), by dimensions (UTC).

    Omits answers from the response cache. Raises `UnreadableLedger`.
    """
    dimensions = "".join(f"{DIMENSIONS[name]} AS dimension_{name}, " for name in by)
    with connect(ledger, threads=threads, set_aside=set_aside) as connection:
        found = connection.execute(
            f"SELECT {dimensions} count(*), coalesce(sum(json_extract_string(units, '$.{unit}')::DECIMAL(24, 3)), 0) "
            f"FROM receipts WHERE source <> 'cache' AND {period.condition} GROUP BY ALL ORDER BY ALL",
            period.parameters,
        ).fetchall()
    return [UnitLine(dict(zip(by, group, strict=True)), requests, sum_of) for *group, requests, sum_of in found]


def unbilled_work(ledger: Path, period: Period = EVERYTHING, *, set_aside: SetAside = None) -> list[UnbilledLine]:
    """Sum the unbilled attempts of a period, by deployment and outcome. Raises `UnreadableLedger`."""
    worked = "input_uncached + cache_read + cache_write + output > 0"
    with connect(ledger, set_aside=set_aside) as connection:
        found = connection.execute(
            "SELECT deployment, outcome, currency, count(*), sum(input_uncached + cache_read + cache_write), "
            f"sum(output), count(*) FILTER (NOT exact AND {worked}), count(*) FILTER (cost IS NULL AND {worked}), "
            f"coalesce(sum(cost), 0) FROM work WHERE kind = 'unbilled' AND {period.condition} "
            "GROUP BY ALL ORDER BY deployment, outcome, currency",
            period.parameters,
        ).fetchall()
    lines: dict[tuple[str, str | None], UnbilledLine] = {}
    for deployment, outcome, currency, *counts, cost in found:
        line = lines.get((deployment, outcome))
        before = (0,) * len(counts) if line is None else line[2:-1]
        summed = [one + more for one, more in zip(before, counts, strict=True)]
        costs = {} if line is None else line.cost
        if currency is not None:
            costs[currency] = cost
        lines[deployment, outcome] = UnbilledLine._make([deployment, outcome, *summed, costs])
    return [*lines.values()]


def _summary(dimensions: Sequence[str], period: Period, *, corrected: bool) -> str:
    """Build the query of `summarise`. It reads the rows once, groups them by price, and prices the groups' sums.

    After the currency, each group has the number of its corrections. If there are any, `corrected` must be true, which
    needs the table `corrections`.
    """
    rows, priced = "bills", "(cost IS NOT NULL)"
    prices = [f"bills.{name} AS now_{name}" for name in _PRICED_BY]
    if corrected:
        rows = f"bills LEFT JOIN ({_PRICES_NOW}) AS now ON bills.kind = 'receipt' AND bills.event_id = now.corrects"
        priced = "(cost IS NOT NULL OR coalesce(now.priced, false))"
        prices = [f"if(now.corrects IS NULL, bills.{name}, now.{name}) AS now_{name}" for name in _PRICED_BY]
    names = "".join(f"{dimension.rpartition(' ')[2]}, " for dimension in dimensions)
    # Rows are grouped by what they count as, since an aggregate with a condition takes longer for each row.
    counted = {
        "corrections": "sum(row_count) FILTER (NOT is_receipt)",
        "requests": "sum(row_count) FILTER (is_receipt)",
        "cache_hits": "sum(row_count) FILTER (is_receipt AND source = 'cache')",
        **{name: f"sum({name}) FILTER (source <> 'cache')" for name in TOKENS},
        "inexact": "sum(row_count) FILTER (is_receipt AND source = 'estimate' AND NOT is_refused)",
        "unpriced": "sum(row_count) FILTER (is_receipt AND NOT is_priced)",
    }
    counts = ", ".join(f"coalesce({sum_of}, 0)" for sum_of in counted.values())
    cheaper = f"now_price_input::{_PRICE} - coalesce(now_price_cached_input, now_price_input)::{_PRICE}"
    return f"""
        SELECT {names} now_currency, {counts}, coalesce(sum(cost), 0),
               coalesce(sum(cache_read * ({cheaper})) FILTER (source <> 'cache') * {_MILLIONTH}, 0)
        FROM (
            SELECT {", ".join([*dimensions, *prices])}, source, kind = 'receipt' AS is_receipt,
                   outcome = 'refused' AS is_refused, {priced} AS is_priced, count(*) AS row_count,
                   {", ".join(f"sum({name}) AS {name}" for name in TOKENS)}, sum(cost) AS cost
            FROM {rows} WHERE {period.condition} GROUP BY ALL
        )
        GROUP BY ALL ORDER BY now_currency
    """


__all__ = [
    "COLUMNS",
    "DIMENSIONS",
    "EVERYTHING",
    "TOKENS",
    "Period",
    "SetAside",
    "UnbilledLine",
    "UnitLine",
    "UnreadableLedger",
    "UnreadableRow",
    "UsageLine",
    "bill_rows",
    "corrected_receipts",
    "latest_receipts",
    "sum_unit",
    "summarise",
    "unbilled_work",
    "unpriced_calls",
    "write_parquet",
]  # fmt: skip
