"""The documents of a single process. Where all together are too many, the oldest of the tenant that has most make room,
so that nobody's are crowded out by others who keep more.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from itertools import islice

from gateway.storage.base import DELETE_BATCH_SIZE, Document

SWEEP_SECONDS = 10.0


class _Shelf:
    """One tenant's, the oldest first."""

    __slots__ = ("bytes", "documents")

    def __init__(self) -> None:
        self.documents: OrderedDict[str, tuple[Document, float]] = OrderedDict()
        self.bytes = 0


class MemoryDocuments:
    """`clock` ages them."""

    def __init__(self, max_bytes: int, clock: Callable[[], float]) -> None:
        self._shelves: dict[str, _Shelf] = {}
        self._max_bytes = max_bytes
        self._bytes = 0
        self._clock = clock
        self._next_sweep = 0.0

    def put(self, tenant: str, name: str, document: Document, ttl_seconds: float, max_bytes: int) -> bool:
        self.delete(tenant, name)
        size = document_bytes(name, document)
        if size > min(max_bytes, self._max_bytes):
            return False
        now = self._clock()
        if not self._next_sweep - SWEEP_SECONDS <= now < self._next_sweep:
            self._next_sweep = now + SWEEP_SECONDS
            for owner in list(self._shelves):
                self._drop_old(owner)
        shelf = self._shelves.setdefault(tenant, _Shelf())
        shelf.documents[name] = (document, now + ttl_seconds)
        shelf.bytes += size
        self._bytes += size
        while shelf.bytes > max_bytes:
            self._drop_oldest(tenant)
        while self._bytes > self._max_bytes:
            self._drop_oldest(max(self._shelves, key=lambda owner: self._shelves[owner].bytes))
        return True

    def get(self, tenant: str, name: str) -> Document | None:
        shelf = self._shelves.get(tenant)
        document, expires_at = shelf.documents.get(name, (None, 0.0)) if shelf is not None else (None, 0.0)
        if document is not None and expires_at <= self._clock():
            self.delete(tenant, name)
            return None
        return document

    def heads(self, tenant: str, names: Sequence[str]) -> list[bytes | None]:
        found = (self.get(tenant, name) for name in names)
        return [None if document is None else document.head for document in found]

    def delete(self, tenant: str, name: str) -> bool:
        """False also of one whose time was over."""
        shelf = self._shelves.get(tenant)
        if shelf is None or name not in shelf.documents:
            return False
        document, expires_at = shelf.documents.pop(name)
        size = document_bytes(name, document)
        shelf.bytes -= size
        self._bytes -= size
        if not shelf.documents:
            del self._shelves[tenant]
        return expires_at > self._clock()

    def delete_some(self, tenant: str) -> int:
        shelf = self._shelves.get(tenant)
        names = list(islice(shelf.documents, DELETE_BATCH_SIZE)) if shelf is not None else []
        for name in names:
            self.delete(tenant, name)
        return len(names)

    def _drop_oldest(self, tenant: str) -> None:
        self.delete(tenant, next(iter(self._shelves[tenant].documents)))

    def _drop_old(self, tenant: str) -> None:
        """Those whose time is over, up to the first that still has some: mostly all of them have as much."""
        while shelf := self._shelves.get(tenant):
            name, (_, expires_at) = next(iter(shelf.documents.items()))
            if expires_at > self._clock():
                return
            self.delete(tenant, name)


def document_bytes(name: str, document: Document) -> int:
    """How much of the engine's room it takes."""
    return len(name) + len(document.head) + len(document.body)
