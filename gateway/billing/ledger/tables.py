"""DuckDB tables of the ledger, over both kinds of segment files: JSON lines and Parquet.

work         receipts, corrections and unbilled work: everything that the deployments have done
bills        the receipts and corrections of `work`: `COLUMNS` and those of corrections, with `cost` as a decimal
receipts     the receipts of `bills`
corrections  the corrections of `bills`; copied into memory, since they are few
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import duckdb

from gateway.billing.ledger.chain import chains, first_event_id, segments
from gateway.billing.ledger.segment_locks import lock_for_reading

# The receipt's fields. Parquet files of an earlier version lack newer fields, which are then null.
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
    "cache_write_1h": "BIGINT",
    "output": "BIGINT",
    "reasoning": "BIGINT",
    "audio_input": "BIGINT",
    "audio_output": "BIGINT",
    "price_version": "VARCHAR",
    "price_input": "VARCHAR",
    "price_cached_input": "VARCHAR",
    "price_cache_write": "VARCHAR",
    "price_cache_write_1h": "VARCHAR",
    "price_output": "VARCHAR",
    "price_reasoning": "VARCHAR",
    "price_audio_input": "VARCHAR",
    "price_audio_output": "VARCHAR",
    "cost": "VARCHAR",
    "currency": "VARCHAR",
    "attempts": "JSON",
    "policy_hash": "VARCHAR",
    "trace_id": "VARCHAR",
    "implausible": "VARCHAR",
}
_CORRECTION_COLUMNS = {"corrects": "VARCHAR", "reason": "VARCHAR", "corrected": "VARCHAR"}
ROW_COLUMNS = {"kind": "VARCHAR", **COLUMNS, **_CORRECTION_COLUMNS}
"""The columns of all kinds of rows, with the types as which they are read from JSON."""

_COST = "DECIMAL(38, 15)"  # an atom of money is 1e-15
_CORRECTION = b'"kind":"correction"'


def typed_columns(names: Iterable[str]) -> str:
    """Return a SELECT list that converts columns read from JSON to the types of the tables."""
    return ", ".join(f"{name}::{_COST} AS {name}" if name == "cost" else name for name in names)


def null_columns(names: Iterable[str]) -> str:
    """Return a SELECT list of typed nulls, for rows that lack these columns."""
    return ", ".join(f"NULL::{_COST if name == 'cost' else ROW_COLUMNS[name]} AS {name}" for name in names)


class UnreadableLedger(Exception):
    """A file of the ledger is malformed, or has the same rows as another file. The message names the file."""


def database(threads: int | None = None) -> duckdb.DuckDBPyConnection:
    """Open an empty database in memory that never downloads extensions. `threads` defaults to one per core."""
    config: dict[str, str | bool | int | float | list[str]] = {
        "autoinstall_known_extensions": False,
        "autoload_known_extensions": False,
    }
    return duckdb.connect(":memory:", config=config if threads is None else {**config, "threads": threads})


@contextmanager
def connect(ledger: Path, *, threads: int | None = None) -> Iterator[duckdb.DuckDBPyConnection]:
    """Open a database in memory with the tables of a ledger. No segment is removed while the database is open.

    Raises `UnreadableLedger`. Every DuckDB error inside the `with` block becomes an `UnreadableLedger` as well.
    """
    found = chains(ledger)
    try:
        with lock_for_reading(found), database(threads) as connection:
            files = [file for chain in found for file in segments(chain) if file.stat().st_size]
            _refuse_copies(files)
            lines = [file for file in files if file.suffix == ".jsonl"]
            compacted = [file for file in files if file.suffix == ".parquet"]
            connection.execute(f"CREATE VIEW work AS {_rows(lines, compacted)}")
            connection.execute("CREATE VIEW bills AS FROM work WHERE kind <> 'unbilled'")
            connection.execute("CREATE VIEW receipts AS FROM bills WHERE kind = 'receipt'")
            with_corrections = _rows([file for file in lines if _has_correction(file)], compacted)
            connection.execute(f"CREATE TABLE corrections AS FROM ({with_corrections}) WHERE kind = 'correction'")
            yield connection
    except duckdb.Error as error:
        raise UnreadableLedger(str(error)) from error


def _refuse_copies(files: Iterable[Path]) -> None:
    """Raise `UnreadableLedger` if a chain was copied or collected into its own ledger, where its calls count twice."""
    seen: dict[str, Path] = {}
    for file in files:
        event_id = first_event_id(file)
        if event_id is not None and (other := seen.setdefault(event_id, file)) is not file:
            raise UnreadableLedger(
                f"{file} has the same rows as {other}, so calls would count twice: move one of them away"
            )


def _rows(lines: list[Path], compacted: list[Path]) -> str:
    columns = ", ".join(f"{name}: '{kind}'" for name, kind in ROW_COLUMNS.items())
    # Selects no row. Gives the result all columns, even if there are no segments or only older Parquet files.
    parts = [f"SELECT {null_columns(ROW_COLUMNS)} WHERE false"]
    if lines:
        source = f"read_json({_sql_list(lines)}, format = 'newline_delimited', columns = {{{columns}}})"
        parts.append(f"SELECT {typed_columns(ROW_COLUMNS)} FROM {source}")
    if compacted:
        source = f"read_parquet({_sql_list(compacted)}, union_by_name = true)"
        parts.append(f"SELECT * EXCLUDE (line), line::JSON->'attempts' AS attempts FROM {source}")
    return f"SELECT * FROM ({' UNION ALL BY NAME '.join(parts)}) WHERE kind IN ('receipt', 'correction', 'unbilled')"


def _sql_list(files: list[Path]) -> str:
    return "[" + ", ".join("'" + str(file).replace("'", "''") + "'" for file in files) + "]"


def _has_correction(file: Path) -> bool:
    """Return whether a `.jsonl` segment has a correction. Searching bytes is much cheaper than parsing JSON."""
    with file.open("rb") as content, mmap.mmap(content.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        return mapped.find(_CORRECTION) >= 0
