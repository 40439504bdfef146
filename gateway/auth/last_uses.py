"""When each API key was last used, for lists of keys. Kept in the storage, which all gateways share.

A request writes nothing. Once a minute, each worker writes one small document for each key that was used since, at most
`KEYS_PER_WRITE` of them. So a time is up to a minute old, and what a killed process has not written is lost.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping, Sequence

from gateway.core.errors import StorageUnavailable
from gateway.storage.base import Document, DocumentStore

WRITE_SECONDS = 60.0  # between two writes
KEYS_PER_WRITE = 1000  # the others wait for the next one
KEYS_PENDING_MAX = 20_000  # while the storage is unavailable; further keys are not noted
KEPT_SECONDS = 400 * 86_400.0  # after the last use
SPACE = "\x1flast-uses"  # the documents' tenant; names of tenants have no control characters
BYTES_MAX = 16 * 2**20  # of all documents, each of which has some 20 bytes


class LastUses:
    """Writes and reads the last uses of keys. `take` returns those since its last call, in ns since the epoch."""

    def __init__(self, documents: DocumentStore, take: Callable[[], Mapping[str, int]]) -> None:
        self._documents = documents
        self._take = take
        self._pending: dict[str, int] = {}  # not written yet

    async def run(self) -> None:
        """Write every minute, and once more when cancelled. What cannot be written waits for the next time."""
        try:
            while True:
                await asyncio.sleep(WRITE_SECONDS)
                with contextlib.suppress(StorageUnavailable):
                    await self.write()
        except asyncio.CancelledError:
            with contextlib.suppress(StorageUnavailable):
                await self.write()
            raise

    async def write(self) -> None:
        """Write what is pending, at most `KEYS_PER_WRITE` keys. Raises `StorageUnavailable`."""
        for key_id, used_ns in self._take().items():
            if key_id in self._pending or len(self._pending) < KEYS_PENDING_MAX:
                self._pending[key_id] = used_ns
        for key_id in list(self._pending)[:KEYS_PER_WRITE]:
            used_ns = self._pending[key_id]
            document = Document(str(used_ns).encode(), b"")
            await self._documents.put_document(SPACE, key_id, document, ttl_seconds=KEPT_SECONDS, max_bytes=BYTES_MAX)
            if self._pending.get(key_id) == used_ns:
                del self._pending[key_id]

    async def of(self, key_ids: Sequence[str]) -> dict[str, int]:
        """The last use of each of these keys that has one, in ns since the epoch. Raises `StorageUnavailable`."""
        found: dict[str, int] = {}
        for first in range(0, len(key_ids), KEYS_PER_WRITE):
            some = key_ids[first : first + KEYS_PER_WRITE]
            heads = await self._documents.get_heads(SPACE, some)
            found |= {key_id: int(head) for key_id, head in zip(some, heads, strict=True) if head is not None}
        for key_id in key_ids:
            if key_id in self._pending:
                found[key_id] = max(found.get(key_id, 0), self._pending[key_id])
        return found
