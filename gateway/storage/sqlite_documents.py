"""Stored documents in a SQLite file: the SQL of each operation, which runs inside a transaction.

Functions without an underscore implement `DocumentStore` in `gateway.storage.base`. Row numbers only grow, so a
tenant's oldest document has the tenant's lowest row number. Triggers count each tenant's bytes.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from typing import NamedTuple

from gateway.storage.base import DELETE_BATCH_SIZE, Document

TABLES = """
CREATE TABLE documents (
    number INTEGER PRIMARY KEY AUTOINCREMENT, tenant TEXT NOT NULL, name TEXT NOT NULL, head BLOB NOT NULL,
    body BLOB NOT NULL, expires_at REAL NOT NULL
);
CREATE UNIQUE INDEX documents_by_name ON documents (tenant, name);
CREATE INDEX documents_by_age ON documents (tenant, number);
CREATE INDEX documents_by_end ON documents (expires_at);
CREATE TABLE document_bytes (tenant TEXT PRIMARY KEY, total INTEGER NOT NULL) WITHOUT ROWID;
CREATE TRIGGER document_put AFTER INSERT ON documents BEGIN
    INSERT INTO document_bytes VALUES (new.tenant, length(CAST(new.name AS BLOB)) + length(new.head) + length(new.body))
    ON CONFLICT (tenant) DO UPDATE SET total = total + excluded.total;
END;
CREATE TRIGGER document_gone AFTER DELETE ON documents BEGIN
    UPDATE document_bytes
    SET total = total - length(CAST(old.name AS BLOB)) - length(old.head) - length(old.body)
    WHERE tenant = old.tenant;
    DELETE FROM document_bytes WHERE tenant = old.tenant AND total = 0;
END;
"""


class Bounds(NamedTuple):
    """Limits in bytes: for the documents of a tenant, and for all documents in the engine."""

    tenant: int
    engine: int


def put(
    tenant: str, name: str, document: Document, ttl_seconds: float, now: float, bounds: Bounds, db: sqlite3.Connection
) -> bool:
    """Store or replace a document. Deletes the oldest documents until both limits are met.

    Returns False if the document alone exceeds a limit.
    """
    db.execute("DELETE FROM documents WHERE tenant = ? AND name = ?", (tenant, name))  # REPLACE fires no trigger
    if len(name.encode()) + len(document.head) + len(document.body) > min(bounds):
        return False
    db.execute(
        "INSERT INTO documents (tenant, name, head, body, expires_at) VALUES (?, ?, ?, ?, ?)",
        (tenant, name, document.head, document.body, now + ttl_seconds),
    )
    while db.execute("SELECT total FROM document_bytes WHERE tenant = ?", (tenant,)).fetchone()[0] > bounds.tenant:
        _drop_oldest(tenant, db)
    while db.execute("SELECT total(total) FROM document_bytes").fetchone()[0] > bounds.engine:
        (fullest,) = db.execute("SELECT tenant FROM document_bytes ORDER BY total DESC LIMIT 1").fetchone()
        _drop_oldest(fullest, db)
    return True


def _drop_oldest(tenant: str, db: sqlite3.Connection) -> None:
    query = "DELETE FROM documents WHERE number = (SELECT min(number) FROM documents WHERE tenant = ?)"
    db.execute(query, (tenant,))


def get(tenant: str, name: str, now: float, db: sqlite3.Connection) -> Document | None:
    """Return a document, or None if it does not exist or has expired."""
    query = "SELECT head, body FROM documents WHERE tenant = ? AND name = ? AND expires_at > ?"
    row = db.execute(query, (tenant, name, now)).fetchone()
    return None if row is None else Document(*row)


def heads(tenant: str, names: Sequence[str], now: float, db: sqlite3.Connection) -> list[bytes | None]:
    """Return the heads of documents in the order of `names`, with None for a document that does not exist."""
    placeholders = ", ".join("?" * len(names))
    query = f"SELECT name, head FROM documents WHERE tenant = ? AND name IN ({placeholders}) AND expires_at > ?"
    found = dict(db.execute(query, (tenant, *names, now)).fetchall())
    return [found.get(name) for name in names]


def delete(tenant: str, name: str, now: float, db: sqlite3.Connection) -> bool:
    """Delete a document. Returns False if it does not exist or had expired."""
    query = "SELECT number, expires_at FROM documents WHERE tenant = ? AND name = ?"
    number, expires_at = db.execute(query, (tenant, name)).fetchone() or (None, 0.0)
    db.execute("DELETE FROM documents WHERE number = ?", (number,))
    return bool(expires_at > now)


def names(
    tenant: str,
    folder: str,
    after: str | None,
    limit: int,
    now: float,
    db: sqlite3.Connection,
    *,
    newest_first: bool,
) -> list[str]:
    """Return the names of a folder's documents behind `after`. See `DocumentStore.list_documents`."""
    first, end = _bounds_of(folder)
    if after is not None and newest_first:
        end = min(end, after)
    elif after is not None:
        first = max(first, after + "\0")  # the next name in the order of bytes
    query = "SELECT name FROM documents WHERE tenant = ? AND name >= ? AND name < ? AND expires_at > ? "
    query += f"ORDER BY name {'DESC' if newest_first else 'ASC'} LIMIT ?"
    return [name for (name,) in db.execute(query, (tenant, first, end, now, limit))]


def keep_folder(tenant: str, folder: str, ttl_seconds: float, now: float, db: sqlite3.Connection) -> None:
    """Let the documents of a folder expire later. See `DocumentStore.keep_folder`."""
    query = "UPDATE documents SET expires_at = max(expires_at, ?) WHERE tenant = ? AND expires_at > ? "
    query += "AND (name = ? OR (name >= ? AND name < ?))"
    db.execute(query, (now + ttl_seconds, tenant, now, folder, *_bounds_of(folder)))


def _bounds_of(folder: str) -> tuple[str, str]:
    """The first possible name in a folder, and the first name behind it: 0 follows the slash in the order of bytes."""
    return f"{folder}/", f"{folder}0"


def delete_some(tenant: str, db: sqlite3.Connection) -> int:
    """Delete up to `DELETE_BATCH_SIZE` documents of a tenant. Returns the number of deleted documents."""
    some = "SELECT number FROM documents WHERE tenant = ? LIMIT ?"
    return db.execute(f"DELETE FROM documents WHERE number IN ({some})", (tenant, DELETE_BATCH_SIZE)).rowcount


def sweep(now: float, db: sqlite3.Connection) -> None:
    """Delete up to `DELETE_BATCH_SIZE` expired documents. Reads ignore them, but the file must not keep them."""
    expired = "SELECT number FROM documents WHERE expires_at <= ? LIMIT ?"
    db.execute(f"DELETE FROM documents WHERE number IN ({expired})", (now, DELETE_BATCH_SIZE))
