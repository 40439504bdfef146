"""Records of administrators in a SQLite file. All functions run inside a transaction.

The position is the file's random id and the number of the last change that was read. A deleted record stays as a row
without a value, so the numbers only grow.
"""

from __future__ import annotations

import sqlite3

from gateway.storage.base import RECORDS_PER_READ, RecordChanges, StoredRecord

TABLES = """
CREATE TABLE records (
    kind TEXT NOT NULL, name TEXT NOT NULL, value TEXT, revision INTEGER NOT NULL, number INTEGER NOT NULL UNIQUE,
    PRIMARY KEY (kind, name)
) WITHOUT ROWID;
CREATE TABLE record_store (id TEXT NOT NULL);
INSERT INTO record_store VALUES (lower(hex(randomblob(8))));
"""


def change(record: StoredRecord, db: sqlite3.Connection) -> bool:
    """Replace the previous revision of a record. Returns False if the stored revision is another one."""
    key = (record.kind, record.name)
    row = db.execute("SELECT revision FROM records WHERE kind = ? AND name = ?", key).fetchone()
    if record.revision != (0 if row is None else row[0] + 1):
        return False
    (number,) = db.execute("SELECT coalesce(max(number), 0) + 1 FROM records").fetchone()
    db.execute("REPLACE INTO records VALUES (?, ?, ?, ?, ?)", (*key, record.value, record.revision, number))
    return True


def since(position: str, db: sqlite3.Connection) -> RecordChanges:
    """Return the records that have changed since a position."""
    (store,) = db.execute("SELECT id FROM record_store").fetchone()
    known, _, after = position.partition(":")
    restarted = known != store
    query = "SELECT kind, name, value, revision, number FROM records WHERE number > ? ORDER BY number LIMIT ?"
    rows = db.execute(query, (0 if restarted else int(after), RECORDS_PER_READ)).fetchall()
    last = rows[-1][4] if rows else 0 if restarted else after
    return RecordChanges([StoredRecord(*row[:4]) for row in rows], f"{store}:{last}", restarted)
