"""The documents of the memory engine: an ordered map per tenant, oldest first.

If all documents together exceed the engine's bytes, the oldest of the tenant with the most bytes are deleted. So a
tenant with few documents does not lose them to one with many.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from itertools import islice

from gateway.storage.base import DELETE_BATCH_SIZE, Document

SWEEP_SECONDS = 10.0


class _TenantDocuments:
    """One tenant's documents with their expiry, oldest first, and their total bytes."""

    __slots__ = ("bytes", "documents")

    def __init__(self) -> None:
        self.documents: OrderedDict[str, tuple[Document, float]] = OrderedDict()
        self.bytes = 0


class MemoryDocuments:
    """`DocumentStore` for one process. `clock` gives seconds since the epoch, by which documents expire."""

    def __init__(self, max_bytes: int, clock: Callable[[], float]) -> None:
        self._tenants: dict[str, _TenantDocuments] = {}
        self._max_bytes = max_bytes
        self._bytes = 0
        self._clock = clock
        self._next_sweep = 0.0

    def put(self, tenant: str, name: str, document: Document, ttl_seconds: float, max_bytes: int) -> bool:
        """Store or replace a document. Deletes the oldest until the tenant's bytes and the engine's are within bounds.

        False if the document alone exceeds one of the bounds.
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
        own.bytes += size
        self._bytes += size
        while own.bytes > max_bytes:
            self._drop_oldest(tenant)
        while self._bytes > self._max_bytes:
            self._drop_oldest(max(self._tenants, key=lambda each: self._tenants[each].bytes))
        return True

    def get(self, tenant: str, name: str) -> Document | None:
        """None if there is no such document, or it has expired."""
        own = self._tenants.get(tenant)
        document, expires_at = own.documents.get(name, (None, 0.0)) if own is not None else (None, 0.0)
        if document is not None and expires_at <= self._clock():
            self.delete(tenant, name)
            return None
        return document

    def heads(self, tenant: str, names: Sequence[str]) -> list[bytes | None]:
        """The heads in the order of `names`; None for a document that does not exist."""
        found = (self.get(tenant, name) for name in names)
        return [None if document is None else document.head for document in found]

    def delete(self, tenant: str, name: str) -> bool:
        """False if the document does not exist, or had expired."""
        own = self._tenants.get(tenant)
        if own is None or name not in own.documents:
            return False
        document, expires_at = own.documents.pop(name)
        size = document_bytes(name, document)
        own.bytes -= size
        self._bytes -= size
        if not own.documents:
            del self._tenants[tenant]
        return expires_at > self._clock()

    def delete_some(self, tenant: str) -> int:
        """Delete up to `DELETE_BATCH_SIZE` documents of a tenant, oldest first. Returns how many."""
        own = self._tenants.get(tenant)
        names = list(islice(own.documents, DELETE_BATCH_SIZE)) if own is not None else []
        for name in names:
            self.delete(tenant, name)
        return len(names)

    def _drop_oldest(self, tenant: str) -> None:
        self.delete(tenant, next(iter(self._tenants[tenant].documents)))

    def _drop_expired(self, tenant: str) -> None:
        """Delete expired documents, up to the first that has not: most documents of a tenant have the same lifetime."""
        while own := self._tenants.get(tenant):
            name, (_, expires_at) = next(iter(own.documents.items()))
            if expires_at > self._clock():
                return
            self.delete(tenant, name)


def document_bytes(name: str, document: Document) -> int:
    """The bytes that a document counts for."""
    return len(name) + len(document.head) + len(document.body)
