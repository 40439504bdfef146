"""MemoryDocuments: when expired documents are deleted. The contract suite has the rest."""

from __future__ import annotations

from gateway.storage.base import Document
from gateway.storage.memory_documents import SWEEP_SECONDS, MemoryDocuments

DOCUMENT = Document(b"head", b"body")


def test_a_put_deletes_the_expired_documents_of_all_tenants() -> None:
    now = 0.0
    documents = MemoryDocuments(1000, lambda: now)
    for number in range(3):
        documents.put("a", f"{number}", DOCUMENT, ttl_seconds=5.0, max_bytes=1000)
    documents.put("b", "long", DOCUMENT, ttl_seconds=60.0, max_bytes=1000)
    now += SWEEP_SECONDS
    documents.put("c", "x", DOCUMENT, ttl_seconds=60.0, max_bytes=1000)
    assert {tenant: own.bytes for tenant, own in documents._tenants.items()} == {"b": 12, "c": 9}
