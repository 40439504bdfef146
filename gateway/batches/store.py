"""The port of what the Batch API keeps. One engine per kind of storage; a contract suite runs over both.

Everything that is written is there after `kill -9`, of the gateway at any moment. An engine that can not be reached
raises `StorageUnavailable`; whether the operation took place is then unknown, and whoever must know reads again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Protocol

from gateway.batches.records import Batch, File, Result

CHUNK_BYTES = 256 * 1024  # of a content, at most, per operation
UNFINISHED_SECONDS = 3600.0  # a content that no file has come to name by then was left by somebody who was killed

Change = Callable[[Batch], Batch | None]
"""What a batch is to become; None: nothing is to be written. May be called again with a newer value."""


class Store(Protocol):
    async def open(self) -> None: ...

    async def close(self) -> None: ...

    # Contents: bytes under the id of the file that will name them.

    async def append(self, content: str, chunk: bytes) -> None:
        """Add at the end; at most `CHUNK_BYTES`."""

    async def read(self, content: str, offset: int, length: int) -> bytes:
        """Up to `length` bytes, which is at most `CHUNK_BYTES`; fewer at the end of the content."""

    async def drop(self, content: str) -> None:
        """Forget a content that no file names."""

    # Files

    async def add_file(self, file: File, *, max_stored_bytes: int) -> bool:
        """The content under the file's id is complete. False, and nothing is written, where the tenant's files would
        have more bytes in all.
        """

    async def file(self, file_id: str) -> File | None: ...

    async def files(
        self, tenant: str, *, purpose: str | None, after: str | None, limit: int, newest_first: bool
    ) -> list[File]: ...

    async def delete_file(self, file: File) -> bool:
        """With its content. False where it is gone already."""

    async def expired_files(self, now: float, limit: int) -> list[File]: ...

    # Batches

    async def add_batch(self, batch: Batch, *, max_open: int) -> bool:
        """False, and nothing is written, where the tenant has as many that are not over."""

    async def batch(self, batch_id: str) -> Batch | None: ...

    async def batches(self, tenant: str, *, after: str | None, limit: int) -> list[Batch]:
        """The newest first."""

    async def open_batches(self) -> list[Batch]:
        """All that are not over, the oldest first."""

    async def ended_before(self, batch_id: str, limit: int) -> list[Batch]:
        """Batches that are over, of all tenants, whose ids sort before this one."""

    async def update(
        self,
        batch_id: str,
        change: Change,
        *,
        results: Sequence[Result] = (),
        paid: Sequence[int] = (),
        files: Sequence[File] = (),
    ) -> Batch | None:
        """In one atomic step: change the batch, add results and files, and take the receipts of `paid` lines away.

        None, and nothing is written, where there is no such batch or `change` says so. The results of a batch that is
        over by this are dropped: its files have them.
        """

    async def forget(self, batch: Batch) -> None:
        """Delete a batch that is over. Its files stay."""

    async def done(self, batch_id: str) -> list[int]:
        """The lines that have a result."""

    async def owed(self, batch_id: str) -> dict[int, bytes]:
        """The receipts, by line, that are not known to stand in the ledger."""

    async def results(self, batch_id: str, *, after_line: int, limit: int) -> list[Result]:
        """In the order of lines; without receipts and tokens."""


def open_store(storage: str, data_dir: Path) -> Store:
    """Where the shared state is a Redis, there; else a file in the data folder. To be opened by `open()`."""
    if storage.partition("://")[0] in ("redis", "rediss", "unix"):
        remote: Store = import_module("gateway.batches.redis_store").RedisStore(storage)
        return remote
    local: Store = import_module("gateway.batches.sqlite_store").SqliteStore(data_dir / "batches.db")
    return local
