"""Interface of the Batch API's storage: must store file contents, files, batches, and the results of request lines.

SQLite and Redis each have one implementation. `tests/contract/test_batch_stores.py` tests both. Every implementation
must guarantee:

* A write that has returned survives `kill -9` of the gateway at any moment.
* Each write is one atomic step. `BatchStore.update` changes a batch and adds its results and files together.
* If the storage cannot be reached, a method raises `StorageUnavailable`. It is then unknown whether the write took
  effect. A caller that must know reads the record.
* Ids sort by creation time (see `records.new_id`), so ordering by id is ordering by age.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from gateway.batches.records import Batch, File, LineResult

CHUNK_BYTES = 256 * 1024  # most bytes of a file's content per operation
UNFINISHED_SECONDS = 3600.0  # age at which content without a file is deleted; its upload was killed

Change = Callable[[Batch], Batch | None]
"""Maps the stored batch to its next value, or to None to write nothing.

The function must have no side effects, because a store may call it several times. This happens if another process
changed the batch first.
"""


class BatchStore(Protocol):
    """Durable storage of files, batches and line results, shared by all gateways on one storage."""

    async def open(self) -> None:
        """Connect, and create the schema if it is missing. Must be awaited before any other method."""

    async def close(self) -> None: ...

    # Contents are bytes, stored under the id of the file that will own them.

    async def append(self, content: str, chunk: bytes) -> None:
        """Add at most `CHUNK_BYTES` to the end of a content. The first chunk creates it."""

    async def read(self, content: str, offset: int, length: int) -> bytes:
        """Return up to `length` bytes, at most `CHUNK_BYTES`. Fewer are returned at the end of the content."""

    async def delete_content(self, content: str) -> None:
        """Delete a content that no file owns. Does nothing if the content does not exist."""

    # Files

    async def add_file(self, file: File, *, max_stored_bytes: int) -> bool:
        """Add a file whose content is complete under the file's id.

        Returns False and writes nothing if the tenant's files would exceed `max_stored_bytes` in total.
        """

    async def file(self, file_id: str) -> File | None:
        """Return a file of any tenant, even if it has expired. The caller checks the tenant and the expiry."""

    async def files(
        self, tenant: str, *, purpose: str | None, after: str | None, limit: int, newest_first: bool
    ) -> list[File]:
        """Return one page of a tenant's files, starting after the file with the id `after`."""

    async def delete_file(self, file: File) -> bool:
        """Delete a file and its content. Returns False if it was already deleted."""

    async def expired_files(self, now: float, limit: int) -> list[File]:
        """Return up to `limit` files of all tenants with `expires_at <= now`, in seconds since the epoch."""

    # Batches

    async def add_batch(self, batch: Batch, *, max_open: int) -> bool:
        """Add a batch. Returns False and writes nothing if the tenant already has `max_open` open batches."""

    async def batch(self, batch_id: str) -> Batch | None:
        """Return a batch of any tenant. The caller checks the tenant."""

    async def batches(self, tenant: str, *, after: str | None, limit: int) -> list[Batch]:
        """Return one page of a tenant's batches, newest first, starting after the batch with the id `after`."""

    async def open_batches(self) -> list[Batch]:
        """Return all batches of all tenants that have not ended, oldest first."""

    async def latest_batches(self, limit: int) -> list[Batch]:
        """Return up to `limit` batches of all tenants, newest first."""

    async def ended_before(self, batch_id: str, limit: int) -> list[Batch]:
        """Return up to `limit` ended batches of all tenants whose ids sort before `batch_id`."""

    async def update(
        self,
        batch_id: str,
        change: Change,
        *,
        results: Sequence[LineResult] = (),
        recorded: Sequence[int] = (),
        files: Sequence[File] = (),
    ) -> Batch | None:
        """Change a batch, add results and files, and delete the receipts of `recorded` lines, in one atomic step.

        Returns the new batch. Returns None and writes nothing if the batch does not exist or `change` returns None.
        If the change ends the batch, all of its results are deleted, because the batch's files then contain them.
        """

    async def delete_batch(self, batch: Batch) -> None:
        """Delete a batch that has ended. The batch's files remain."""

    async def finished_lines(self, batch_id: str) -> list[int]:
        """Return the numbers of the lines that have a result, in any order."""

    async def unrecorded_receipts(self, batch_id: str) -> dict[int, bytes]:
        """Return, by line number, the encoded receipts that are not known to be in the ledger."""

    async def results(self, batch_id: str, *, after_line: int, limit: int) -> list[LineResult]:
        """Return up to `limit` results after `after_line` in line order, without receipts and tokens."""
