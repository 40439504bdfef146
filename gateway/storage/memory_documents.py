"""Stored documents in the memory engine: one ordered map per tenant, oldest document first.

If all documents together exceed the engine's limit, the oldest documents of the tenant with the most bytes are deleted.
A tenant with few documents therefore does not lose them because of a tenant with many.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import OrderedDict
from collections.abc import Callable, Sequence
from itertools import islice

from gateway.storage.base import DELETE_BATCH_SIZE, Document, folder_of

SWEEP_SECONDS = 10.0


class _TenantDocuments:
    """One tenant's documents with their expiry, oldest first, and their total bytes."""

    __slots__ = ("bytes", "documents", "folders")

    def __init__(self) -> None:
        self.documents: OrderedDict[str, tuple[Document, float]] = OrderedDict()
        self.folders: dict[str, list[str]] = {}  # the names of the documents in each folder, sorted
        self.bytes = 0


class MemoryDocuments:
    """`DocumentStore` for one process. `clock` returns seconds since the epoch and is used for expiry."""

    def __init__(self, max_bytes: int, clock: Callable[[], float]) -> None:
        self._tenants: dict[str, _TenantDocuments] = {}
        self._max_bytes = max_bytes
        self._bytes = 0
        self._clock = clock
        self._next_sweep = 0.0

    def put(self, tenant: str, name: str, document: Document, ttl_seconds: float, max_bytes: int) -> bool:
        """Store or replace a document. Deletes the oldest documents while the tenant or the engine exceeds its limit.

        Returns False if the document alone exceeds one of the two limits.
        """
        self.delete(tenant, name)
        size = document_bytes(name, document)
        if size > min(max_bytes, self._max_bytes):
            return False
        now = self._clock()
        if not self._next_sweep - SWEEP_SECONDS <= now < self._next_sweep:
            self._next_sweep = now + SWEEP_SECONDS
            for each in list(self._tenants):
                self._drop_expired(each)
        own = self._tenants.setdefault(tenant, _TenantDocuments())
        own.documents[name] = (document, now + ttl_seconds)
        if (folder := folder_of(name)) is not None:
            insort(own.folders.setdefault(folder, []), name)
        own.bytes += size
        self._bytes += size
        while own.bytes > max_bytes:
            self._drop_oldest(tenant)
        while self._bytes > self._max_bytes:
            self._drop_oldest(max(self._tenants, key=lambda each: self._tenants[each].bytes))
        return True

    def get(self, tenant: str, name: str) -> Document | None:
        """Return a document, or None if it does not exist or has expired."""
        own = self._tenants.get(tenant)
        document, expires_at = own.documents.get(name, (None, 0.0)) if own is not None else (None, 0.0)
        if document is not None and expires_at <= self._clock():
            self.delete(tenant, name)
            return None
        return document

    def heads(self, tenant: str, names: Sequence[str]) -> list[bytes | None]:
        """Return the heads of documents in the order of `names`, with None for a document that does not exist."""
        found = (self.get(tenant, name) for name in names)
        return [None if document is None else document.head for document in found]

    def delete(self, tenant: str, name: str) -> bool:
        """Delete a document. Returns False if it does not exist or had expired."""
        own = self._tenants.get(tenant)
        if own is None or name not in own.documents:
            return False
        document, expires_at = own.documents.pop(name)
        size = document_bytes(name, document)
        own.bytes -= size
        self._bytes -= size
        if (folder := folder_of(name)) is not None:
            names = own.folders[folder]
            del names[bisect_left(names, name)]
            if not names:
                del own.folders[folder]
        if not own.documents:
            del self._tenants[tenant]
        return expires_at > self._clock()

    def names(self, tenant: str, folder: str, after: str | None, limit: int, newest_first: bool) -> list[str]:
        """Return the names of a folder's documents behind `after`. See `DocumentStore.list_documents`."""
        own = self._tenants.get(tenant)
        names = own.folders.get(folder, []) if own is not None else []
        if newest_first:
            ordered = reversed(names[: bisect_left(names, after) if after is not None else len(names)])
        else:
            ordered = iter(names[bisect_right(names, after) if after is not None else 0 :])
        now = self._clock()
        live = (name for name in ordered if own is not None and own.documents[name][1] > now)
        return list(islice(live, limit))

    def keep_folder(self, tenant: str, folder: str, ttl_seconds: float) -> None:
        """Let the documents of a folder expire later. See `DocumentStore.keep_folder`."""
        own = self._tenants.get(tenant)
        if own is None:
            return
        now = self._clock()
        for name in (folder, *own.folders.get(folder, ())):
            document, expires_at = own.documents.get(name, (None, 0.0))
            if document is not None and expires_at > now:
                own.documents[name] = (document, max(expires_at, now + ttl_seconds))

    def delete_some(self, tenant: str) -> int:
        """Delete up to `DELETE_BATCH_SIZE` documents of a tenant, oldest first. Returns the number deleted."""
        own = self._tenants.get(tenant)
        names = list(islice(own.documents, DELETE_BATCH_SIZE)) if own is not None else []
        for name in names:
            self.delete(tenant, name)
        return len(names)

    def _drop_oldest(self, tenant: str) -> None:
        self.delete(tenant, next(iter(self._tenants[tenant].documents)))

    def _drop_expired(self, tenant: str) -> None:
        """Delete a tenant's oldest documents up to the first that has not expired. Most have the same lifetime."""
        while own := self._tenants.get(tenant):
            name, (_, expires_at) = next(iter(own.documents.items()))
            if expires_at > self._clock():
                return
            self.delete(tenant, name)


def document_bytes(name: str, document: Document) -> int:
    """Return the size in bytes with which a document counts towards the limits."""
    return len(name) + len(document.head) + len(document.body)
