"""DuckDB tables of the ledger, over both kinds of segment files: JSON lines and Parquet.

work         receipts, corrections and unbilled work: everything that the deployments have done
bills        the receipts and corrections of `work`: `COLUMNS` and those of corrections, with `cost` as a decimal
receipts     the receipts of `bills`
corrections  the corrections of `bills`; copied into memory by `load_corrections`, since they are few
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import duckdb

from gateway.billing.ledger.chain import chains, first_event_id, segments
from gateway.billing.ledger.rows import USUAL_VALUES
from gateway.billing.ledger.segment_locks import lock_for_reading
from gateway.billing.ledger.unreadable import UnreadableRow, find_unreadable, warn_of_unreadable

# The receipt's fields. Fields that a row omits are null, unless they are in `USUAL_VALUES`. Parquet files of an earlier
# version lack newer fields.
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
    "remainder": "BIGINT",
    "units": "VARCHAR",  # a JSON object
    "price_units": "VARCHAR",  # a JSON object
    "list_cost": "VARCHAR",
    "price_factor": "VARCHAR",
    "exchange_rate": "VARCHAR",
    "price_currency": "VARCHAR",
    "region": "VARCHAR",
    "leased": "BOOLEAN",
    "route": "VARCHAR",
    "model_routed": "VARCHAR",
    "parents": "VARCHAR[]",
}
_CORRECTION_COLUMNS = {"corrects": "VARCHAR", "reason": "VARCHAR", "corrected": "VARCHAR"}
ROW_COLUMNS = {"kind": "VARCHAR", **COLUMNS, **_CORRECTION_COLUMNS}
"""The columns of all kinds of rows, with the types as which they are read from JSON."""

_COST = "DECIMAL(38, 15)"  # an atom of money is 1e-15
# Unbilled work has no usual values: its class is not recorded, and its outcome may be unknown.
_FILLED_IN = ", ".join(
    f"if(kind = 'unbilled', {name}, coalesce({name}, '{value}'::{COLUMNS[name]})) AS {name}"
    for name, value in USUAL_VALUES.items()
    if value is not None
)
_CORRECTION = b'"kind":"correction"'


def typed_columns(names: Iterable[str]) -> str:
    """Return a SELECT list that converts columns read from JSON to the types of the tables."""
    return ", ".join(f"{name}::{_COST} AS {name}" if name == "cost" else name for name in names)


def null_columns(names: Iterable[str]) -> str:
    """Return a SELECT list of typed nulls, for rows that lack these columns."""
    return ", ".join(f"NULL::{_COST if name == 'cost' else ROW_COLUMNS[name]} AS {name}" for name in names)


UNREADABLE = (duckdb.InvalidInputException, duckdb.ConversionException, duckdb.OutOfRangeException)
"""What DuckDB raises at a row that it cannot read."""


class UnreadableLedger(Exception):
    """A file of the ledger is malformed, or has the same rows as another file. The message names the file."""


def database(threads: int | None = None) -> duckdb.DuckDBPyConnection:
    """Open an empty database in memory that never downloads extensions. `threads` defaults to one per core."""
    config: dict[str, str | bool | int | float | list[str]] = {
        "autoinstall_known_extensions": False,
        "autoload_known_extensions": False,
    }
    return duckdb.connect(":memory:", config=config if threads is None else {**config, "threads": threads})


class LedgerTables:
    """A database in memory with the tables of a ledger. Made by `connect`.

    `execute` runs a statement. If it fails at an unreadable row, all unreadable rows are searched for and set aside,
    and it is run again. A ledger without such rows is read only once.
    """

    def __init__(
        self, connection: duckdb.DuckDBPyConnection, files: Sequence[Path], copies: Path, set_aside: list[UnreadableRow]
    ) -> None:
        """`copies` is an empty folder for copies of segments without their unreadable rows."""
        self._connection = connection
        self._lines = [file for file in files if file.suffix == ".jsonl"]
        self._compacted = [file for file in files if file.suffix == ".parquet"]
        self._copies = copies
        self._set_aside = set_aside
        self._searched = False
        self._has_corrections = False
        self._create_views()

    def load_corrections(self) -> None:
        """Create the table `corrections`. Searches all segments for them, so call it only if they are needed."""
        if self._has_corrections:
            return
        with_corrections = [file for file in self._lines if file.stat().st_size and _has_correction(file)]
        try:
            self._create_corrections(with_corrections)
        except UNREADABLE:
            if not self.set_aside_unreadable():
                raise
            self._create_corrections(self._lines)
        self._has_corrections = True

    def execute(self, statement: str, parameters: Mapping[str, Any] | None = None) -> duckdb.DuckDBPyConnection:
        """Run a statement. Returns its result. Its rows must be ordered or aggregated, so that it fails at once."""
        try:
            return self._connection.execute(statement, parameters)
        except UNREADABLE:
            if not self.set_aside_unreadable():
                raise
        return self._connection.execute(statement, parameters)

    def executemany(self, statement: str, parameters: Sequence[Sequence[Any]]) -> None:
        """Run a statement once for each row of parameters."""
        self._connection.executemany(statement, parameters)

    def set_aside_unreadable(self) -> bool:
        """Search for unreadable rows and read the ledger without them from now on. False if there are none, or no more.

        Compacted segments have none, since compaction refuses them.
        """
        if self._searched:
            return False
        self._searched = True
        found = {file: rows for file in self._lines if (rows := find_unreadable(file))}
        self._lines = [self._copy_without(file, found[file]) if file in found else file for file in self._lines]
        self._set_aside += [row for rows in found.values() for row in rows]
        self._create_views()
        return bool(found)

    def _copy_without(self, file: Path, rows: Iterable[UnreadableRow]) -> Path:
        unreadable = {row.line for row in rows}
        copy = self._copies / f"{file.parent.name}-{file.name}"
        with file.open("rb") as lines, copy.open("wb") as readable:
            readable.writelines(line for number, line in enumerate(lines, start=1) if number not in unreadable)
        return copy

    def _create_views(self) -> None:
        lines = [file for file in self._lines if file.stat().st_size]
        self._connection.execute(f"CREATE OR REPLACE VIEW work AS {_rows(lines, self._compacted)}")
        self._connection.execute("CREATE OR REPLACE VIEW bills AS FROM work WHERE kind <> 'unbilled'")
        self._connection.execute("CREATE OR REPLACE VIEW receipts AS FROM bills WHERE kind = 'receipt'")

    def _create_corrections(self, lines: list[Path]) -> None:
        rows = _rows([file for file in lines if file.stat().st_size], self._compacted)
        self._connection.execute(f"CREATE OR REPLACE TABLE corrections AS FROM ({rows}) WHERE kind = 'correction'")


@contextmanager
def connect(
    ledger: Path, *, threads: int | None = None, set_aside: list[UnreadableRow] | None = None
) -> Iterator[LedgerTables]:
    """Open a database in memory with the tables of a ledger. No segment is removed while the database is open.

    Unreadable rows are omitted and appended to `set_aside`; without a list, they are logged. Raises `UnreadableLedger`
    if a whole file is unreadable. Every other DuckDB error in the `with` block becomes an `UnreadableLedger` as well.
    """
    found = chains(ledger)
    unreadable: list[UnreadableRow] = []
    try:
        with lock_for_reading(found), database(threads) as connection, TemporaryDirectory() as copies:
            files = [file for chain in found for file in segments(chain) if file.stat().st_size]
            _refuse_copies(files)
            yield LedgerTables(connection, files, Path(copies), unreadable)
    except duckdb.Error as error:
        raise UnreadableLedger(str(error)) from error
    finally:
        if set_aside is None:
            warn_of_unreadable(unreadable)
        else:
            set_aside += [row for row in unreadable if row not in set_aside]


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
    rows, kinds = " UNION ALL BY NAME ".join(parts), "'receipt', 'correction', 'unbilled'"
    return f"SELECT * REPLACE ({_FILLED_IN}) FROM ({rows}) WHERE kind IN ({kinds})"


def _sql_list(files: list[Path]) -> str:
    return "[" + ", ".join("'" + str(file).replace("'", "''") + "'" for file in files) + "]"


def _has_correction(file: Path) -> bool:
    """Return whether a `.jsonl` segment has a correction. Searching bytes is much cheaper than parsing JSON."""
    with file.open("rb") as content, mmap.mmap(content.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        return mapped.find(_CORRECTION) >= 0
