"""Compaction: converts full ledger segments to Parquet, which sums up ten times as fast and takes a third of the space.

    0000000001.jsonl  ->  0000000001.parquet    a column for each summed field, and `line`: the row's exact bytes
                          0000000001.manifest   one line of JSON: first row, head, number of rows, hash of the lines

The hash chain can still be verified, because the Parquet file contains every line. `verify` checks a compacted segment
like any other, and also compares its columns with the lines. The `.jsonl` file is removed after the Parquet file was
read back and yielded the same bytes. If a run is interrupted, the next run repeats the conversion.

The newest segments are never compacted: the writer appends to them, and reads the last one with a row when it opens.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

import duckdb
import msgspec

from gateway.billing.ledger.chain import RowError, chains, check_row, compactable_segments
from gateway.billing.ledger.rows import decode_head
from gateway.billing.ledger.segment_locks import lock_for_removal
from gateway.billing.ledger.tables import ROW_COLUMNS, UnreadableLedger, database, null_columns, typed_columns
from gateway.billing.ledger.unreadable import why_unreadable

LINE_BYTES_MAX = 64 * 1024 * 1024
_FETCH_ROWS = 10_000
_ROW_GROUP_ROWS = 100_000

_NEVER = "\\x01"  # the CSV delimiter: JSON always escapes this byte, so each line is one CSV field
_STORED = [name for name in ROW_COLUMNS if name != "attempts"]
_STRUCTURE = "{" + ", ".join(f'"{name}": "{ROW_COLUMNS[name]}"' for name in _STORED) + "}"
_COLUMNS = f"unnest(json_transform(line, '{_STRUCTURE}'))"


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """Describes a compacted segment, for readers that do not need its rows."""

    kind: str = "compacted"
    event_id: str  # of the first row
    rows: int
    prev: str
    head: str  # hash of the last row
    sha256: str  # of all lines


class CompactedSegment(msgspec.Struct, frozen=True):
    """A segment that was compacted, with its size in bytes before and after."""

    file: Path
    rows: int
    bytes_before: int
    bytes_after: int


def compact(
    ledger: Path, *, before: float, done: Callable[[CompactedSegment], None] = lambda _: None
) -> list[CompactedSegment]:
    """Compact the segments that were last written before `before` (seconds since the epoch).

    Calls `done` after each segment. A segment that cannot be compacted stays as it is, and the others are compacted.
    Afterwards raises `UnreadableLedger`, which names all that stayed.
    """
    compacted, problems = [], []
    for chain in chains(ledger):
        for file in compactable_segments(chain):
            if file.stat().st_mtime >= before:
                continue
            try:
                one = compact_segment(file)
            except UnreadableLedger as error:
                problems.append(str(error))
                continue
            if one is not None:
                compacted.append(one)
                done(one)
    if problems:
        raise UnreadableLedger("\n".join(problems))
    return compacted


def compact_segment(file: Path, *, threads: int | None = None) -> CompactedSegment | None:
    """Compact one segment. Returns None if it is empty or already compacted. Raises `UnreadableLedger`."""
    with _compaction_lock(file.parent):
        return _compact(file, threads) if file.exists() and file.stat().st_size else None


def read_lines(file: Path) -> Iterator[bytes]:
    """Yield the lines of a segment, compacted or not, as they were written. `chain.verify` uses this function.

    Raises `RowError` if a column differs from its line, or if the file is unreadable.
    """
    if file.suffix != ".parquet":
        with file.open("rb") as lines:
            yield from lines
        return
    with database() as connection:
        try:
            wrong = _wrong_columns(connection, file)
            rows = connection.execute("SELECT line FROM read_parquet($file)", {"file": str(file)})
            for number, line in enumerate(_fetched(rows)):
                if number == wrong:
                    raise RowError("the row's columns differ from its line")
                yield line
        except duckdb.Error as error:
            raise RowError(str(error)) from error


def compacted_lines(file: Path) -> Iterator[bytes]:
    """Yield the lines of a compacted segment without checking its columns. Raises `UnreadableLedger`."""
    with database(threads=1) as connection:
        try:
            yield from _fetched(connection.execute("SELECT line FROM read_parquet($file)", {"file": str(file)}))
        except duckdb.Error as error:
            raise UnreadableLedger(f"{file}: {error}") from error


def find_event_ids(file: Path, event_ids: Collection[str]) -> set[str]:
    """Return those of `event_ids` whose rows are in this compacted segment. Raises `UnreadableLedger`."""
    with database(threads=1) as connection:
        try:
            rows = connection.execute(
                "SELECT event_id FROM read_parquet($file) WHERE list_contains($ids, event_id)",
                {"file": str(file), "ids": list(event_ids)},
            ).fetchall()
        except duckdb.Error as error:
            raise UnreadableLedger(f"{file}: {error}") from error
    return {event_id for (event_id,) in rows}


@contextmanager
def _compaction_lock(chain: Path) -> Iterator[None]:
    """Lock that lets only one process compact a chain: a gateway and `warmpath usage compact` may run together."""
    with (chain / "compacting").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _compact(file: Path, threads: int | None) -> CompactedSegment:
    content = file.read_bytes()
    manifest = _manifest_of(file, content)
    target, unfinished = file.with_suffix(".parquet"), file.with_suffix(".unfinished")
    with database(threads) as connection:
        lines = f"""
            SELECT line FROM read_csv('{_quoted(file)}', columns = {{'line': 'VARCHAR'}}, delim = '{_NEVER}',
                quote = '', escape = '', header = false, auto_detect = false, max_line_size = {LINE_BYTES_MAX})
        """
        try:
            connection.execute(
                f"COPY (SELECT {typed_columns(_STORED)}, line FROM (SELECT line, {_COLUMNS} FROM ({lines}))) "
                f"TO '{_quoted(unfinished)}' (FORMAT parquet, COMPRESSION zstd, ROW_GROUP_SIZE {_ROW_GROUP_ROWS})"
            )
            rows = connection.execute("SELECT line FROM read_parquet($file)", {"file": str(unfinished)})
            digest = hashlib.sha256()
            for line in _fetched(rows):
                digest.update(line)
        except duckdb.Error as error:
            raise UnreadableLedger(f"{file}: {error}") from error
    if digest.hexdigest() != manifest.sha256:
        raise UnreadableLedger(f"{file}: its Parquet does not contain the same rows, so it was not compacted")
    # Manifest and Parquet are durable before the `.jsonl` file is removed, which waits until no process reads it.
    _make_durable(file.with_suffix(".manifest"), msgspec.json.encode(manifest) + b"\n")
    _sync(unfinished)
    unfinished.replace(target)
    _sync(file.parent)
    with lock_for_removal(file.parent, wait=True):
        file.unlink()
    return CompactedSegment(target, manifest.rows, len(content), target.stat().st_size)


def _manifest_of(file: Path, content: bytes) -> Manifest:
    """Check a segment's rows and return its manifest. Raises `UnreadableLedger` at a broken row."""
    rows, first_prev, head, first = 0, "", "", b""
    for rows, line in enumerate(content.splitlines(keepends=True), start=1):
        try:
            prev, digest = check_row(line)
            if rows > 1 and prev != head:
                raise RowError("rows before this one were removed, added or moved")
            if (why := why_unreadable(line)) is not None:  # with null columns, readers would not set it aside
                raise RowError(f"the row is unreadable: {why}")
        except RowError as error:
            raise UnreadableLedger(f"{file}:{rows}: {error}") from error
        if rows == 1:
            first_prev, first = prev, line
        head = digest
    return Manifest(
        event_id=decode_head(first).event_id,
        rows=rows,
        prev=first_prev,
        head=head,
        sha256=hashlib.sha256(content).hexdigest(),
    )


def _wrong_columns(connection: duckdb.DuckDBPyConnection, file: Path) -> int | None:
    """Return the number (from 0) of the first row whose columns differ from its line. None if all agree.

    A file that an earlier version wrote may lack columns. They count as null.
    """
    stored = (
        f"SELECT {null_columns(_STORED)} WHERE false UNION ALL BY NAME "
        f"SELECT file_row_number AS number, * FROM read_parquet('{_quoted(file)}', file_row_number = true)"
    )
    parsed = f"SELECT {typed_columns(_STORED)}, number FROM (SELECT number, {_COLUMNS} FROM stored)"
    differ = " OR ".join(f"stored.{name} IS DISTINCT FROM parsed.{name}" for name in _STORED)
    found = connection.execute(
        f"WITH stored AS ({stored}), parsed AS ({parsed}) "
        f"SELECT min(number) FROM stored JOIN parsed USING (number) WHERE {differ}"
    ).fetchone()
    return found[0] if found else None


def _fetched(rows: duckdb.DuckDBPyConnection) -> Iterator[bytes]:
    while some := rows.fetchmany(_FETCH_ROWS):
        for (line,) in some:
            yield line.encode() + b"\n"


def _quoted(file: Path) -> str:
    return str(file).replace("'", "''")


def _make_durable(file: Path, content: bytes) -> None:
    file.write_bytes(content)
    _sync(file)


def _sync(file: Path) -> None:
    descriptor = os.open(file, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def main() -> None:
    """Compact the segment named on the command line, at the lowest priority. `Compactor` starts this process."""
    os.nice(19)
    file = Path(sys.argv[1])
    try:
        if compact_segment(file, threads=1) is None and file.exists():
            sys.exit(f"{file} is empty")
    except (UnreadableLedger, OSError) as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
