"""Remembers which meter events were exported to Stripe or OpenMeter, so that no export can bill a call twice.

Stripe forgets an event's identifier after a day, and OpenMeter after its deduplication window. So the export itself
must know what it has sent. An event is exported once, in a numbered export. If sending the file failed, the same export
can be repeated: by then the receiver has either none of its events, or still knows their identifiers
(`REPEAT_SECONDS`). Each receiver has a file of its own.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

REPEAT_SECONDS = 23 * 3_600.0  # below the 24 hours for which Stripe recognises an identifier
ACCEPTED_SECONDS = 35 * 86_400.0  # how old an event for Stripe may be


class NotRepeatable(Exception):
    """An export does not exist, or is too old to be repeated. The message says which."""


class StripeExports:
    """The exports in one SQLite file. Made by `open_exports`."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        connection.execute("CREATE TABLE IF NOT EXISTS exports (id INTEGER PRIMARY KEY, at REAL NOT NULL)")
        connection.execute(
            "CREATE TABLE IF NOT EXISTS events (identifier TEXT PRIMARY KEY, export INTEGER NOT NULL) WITHOUT ROWID"
        )

    def exported(self, identifiers: Iterable[str]) -> set[str]:
        """Those of the identifiers that an export contains."""
        known = self._connection.execute
        return {one for one in identifiers if known("SELECT 1 FROM events WHERE identifier = ?", (one,)).fetchone()}

    def record(self, identifiers: Iterable[str], *, now: float) -> int:
        """Record an export. Returns its number. Takes effect when the `with` block of `open_exports` ends."""
        number = self._connection.execute("INSERT INTO exports (at) VALUES (?)", (now,)).lastrowid
        assert number is not None
        rows = [(identifier, number) for identifier in identifiers]
        self._connection.executemany("INSERT INTO events VALUES (?, ?)", rows)
        return number

    def repeat(self, number: int, *, now: float) -> set[str]:
        """The identifiers of an export that may still be repeated. Raises `NotRepeatable`."""
        found = self._connection.execute("SELECT at FROM exports WHERE id = ?", (number,)).fetchone()
        if found is None:
            raise NotRepeatable(f"there is no export {number}")
        if now - found[0] > REPEAT_SECONDS:
            raise NotRepeatable(
                f"export {number} is too old: the receiver may have forgotten its events and bill them again"
            )
        rows = self._connection.execute("SELECT identifier FROM events WHERE export = ?", (number,))
        return {identifier for (identifier,) in rows}


@contextmanager
def open_exports(file: Path) -> Iterator[StripeExports]:
    """Open the file in one transaction, which an exception rolls back. Another export waits or fails meanwhile."""
    file.parent.mkdir(parents=True, exist_ok=True)
    connection = sqlite3.connect(file, isolation_level=None)
    try:
        connection.execute("BEGIN IMMEDIATE")
        yield StripeExports(connection)
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise
    finally:
        connection.close()
