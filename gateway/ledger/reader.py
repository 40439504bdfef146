"""Sums over the ledger, by DuckDB: every number comes from the rows alone, and money stays decimal throughout.

A call belongs to the day on which it ended, since that is when its row was written: a day that is over gains nothing.
Tokens of answers from the response cache are not summed, as no engine worked for them; `cache_hits` counts the calls.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any, NamedTuple

import duckdb

from gateway.ledger.chain import chains, segments

DIMENSIONS = {
    "tenant": "tenant",
    "key": "key_id",
    "model": "model_asked",
    "day": "finished[:10]",
    "class": "latency_class",
    "deployment": "deployment",
}

# The receipt's fields. Money stays the text that was written, and is given its decimal type where it is summed.
COLUMNS = {
    "event_id": "VARCHAR",
    "call_id": "VARCHAR",
    "tenant": "VARCHAR",
    "key_id": "VARCHAR",
    "end_user": "VARCHAR",
    "operation": "VARCHAR",
    "model_asked": "VARCHAR",
    "model_served": "VARCHAR",
    "deployment": "VARCHAR",
    "latency_class": "VARCHAR",
    "service_tier": "VARCHAR",
    "started": "VARCHAR",
    "finished": "VARCHAR",
    "ttft_seconds": "DOUBLE",
    "outcome": "VARCHAR",
    "source": "VARCHAR",
    "exact": "BOOLEAN",
    "input_uncached": "BIGINT",
    "cache_read": "BIGINT",
    "cache_write": "BIGINT",
    "output": "BIGINT",
    "reasoning": "BIGINT",
    "audio_input": "BIGINT",
    "audio_output": "BIGINT",
    "price_version": "VARCHAR",
    "price_input": "VARCHAR",
    "price_cached_input": "VARCHAR",
    "price_cache_write": "VARCHAR",
    "price_output": "VARCHAR",
    "price_reasoning": "VARCHAR",
    "price_audio_input": "VARCHAR",
    "price_audio_output": "VARCHAR",
    "cost": "VARCHAR",
    "currency": "VARCHAR",
    "attempts": "JSON",
    "policy_hash": "VARCHAR",
    "trace_id": "VARCHAR",
}

_PRICE_EXPONENT = 6  # prices are per million tokens
_COST = "DECIMAL(38, 18)"
_PRICE = "DECIMAL(18, 9)"  # times a count of tokens it still fits in 38 digits
_SUMS = f"""
    count(*),
    count(*) FILTER (source = 'cache'),
    sum(input_uncached) FILTER (source <> 'cache'),
    sum(cache_read) FILTER (source <> 'cache'),
    sum(cache_write) FILTER (source <> 'cache'),
    sum(output) FILTER (source <> 'cache'),
    sum(reasoning) FILTER (source <> 'cache'),
    count(*) FILTER (source = 'estimate' AND outcome <> 'refused'),
    count(*) FILTER (cost IS NULL),
    sum(cost::{_COST}),
    sum(cache_read * (price_input::{_PRICE} - coalesce(price_cached_input, price_input)::{_PRICE}))
        FILTER (source <> 'cache')
"""


class UnreadableLedger(Exception):
    """A file of the ledger is not what the writer writes. The message names it."""


class UsageLine(NamedTuple):
    """What one group of calls used. `cost` and `saved` are by currency; `group` by dimension.

    `saved` is what reading prefix caches made cheaper. `inexact` calls are billed by an estimate; `unpriced` ones are
    not in `cost`.
    """

    group: dict[str, str | None]
    requests: int
    cache_hits: int
    input_uncached: int
    cache_read: int
    cache_write: int
    output: int
    reasoning: int
    inexact: int
    unpriced: int
    cost: dict[str, Decimal]
    saved: dict[str, Decimal]

    @property
    def cached_share(self) -> float:
        """Of all input tokens, those that were read from a prefix cache."""
        return self.cache_read / ((self.input_uncached + self.cache_read + self.cache_write) or 1)


def summarise(
    ledger: Path,
    *,
    by: Sequence[str] = (),
    since: str | None = None,
    until: str | None = None,
    tenant: str | None = None,
) -> list[UsageLine]:
    """One line per group, in order; `by` names `DIMENSIONS`. Times are texts as receipts have them, `until` excluded.

    Raises `UnreadableLedger`.
    """
    dimensions = "".join(f"{DIMENSIONS[name]}, " for name in by)
    found = _query(
        ledger,
        f"SELECT {dimensions} currency, {_SUMS} FROM receipts WHERE ($since IS NULL OR finished >= $since) "
        "AND ($until IS NULL OR finished < $until) AND ($tenant IS NULL OR tenant = $tenant) GROUP BY ALL",
        {"since": since, "until": until, "tenant": tenant},
    )
    # One row per group and currency -> one line per group.
    groups: dict[tuple[str | None, ...], list[tuple[Any, ...]]] = defaultdict(list)
    for row in found:
        groups[row[: len(by)]].append(row[len(by) :])
    in_order = sorted(groups.items(), key=lambda item: [value or "" for value in item[0]])
    return [_line(dict(zip(by, group, strict=True)), rows) for group, rows in in_order]


def latest(ledger: Path, count: int) -> list[dict[str, Any]]:
    """The last receipts to be written, the latest first, as they stand in their rows. Raises `UnreadableLedger`."""
    found = _query(
        ledger,
        f"SELECT {', '.join(COLUMNS)} FROM receipts ORDER BY finished DESC, event_id DESC LIMIT $n",
        {"n": count},
    )
    rows = [dict(zip(COLUMNS, row, strict=True)) for row in found]
    return [{**row, "attempts": json.loads(row["attempts"])} for row in rows]


def _query(ledger: Path, sql: str, parameters: dict[str, Any]) -> list[tuple[Any, ...]]:
    files = [str(file) for chain in chains(ledger) for file in segments(chain) if file.stat().st_size]
    if not files:
        return []
    columns = ", ".join(f"{name}: '{kind}'" for name, kind in {"kind": "VARCHAR", **COLUMNS}.items())
    rows = f"read_json($files, format = 'newline_delimited', columns = {{{columns}}})"
    source = f"WITH receipts AS (SELECT * EXCLUDE (kind) FROM {rows} WHERE kind = 'receipt') "  # see `ledger.rows`
    with duckdb.connect(":memory:", config={"autoinstall_known_extensions": "false"}) as connection:
        try:
            return connection.execute(source + sql, {"files": files, **parameters}).fetchall()
        except duckdb.Error as error:
            raise UnreadableLedger(str(error)) from error


def _line(group: dict[str, str | None], rows: list[tuple[Any, ...]]) -> UsageLine:
    cost, saved = dict[str, Decimal](), dict[str, Decimal]()
    for currency, *_, spent, saved_per_million in rows:
        if currency is not None:
            cost[currency] = spent or Decimal(0)
            saved[currency] = (saved_per_million or Decimal(0)).scaleb(-_PRICE_EXPONENT)
    counts = [sum(int(count or 0) for count in column) for column in zip(*(row[1:-2] for row in rows), strict=True)]
    return UsageLine._make([group, *counts, dict(sorted(cost.items())), dict(sorted(saved.items()))])
