"""Random histories of documents in every engine, compared with a model: a dictionary in insertion order."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gateway.storage.base import Document, Storage
from gateway.storage.memory import MemoryStorage
from gateway.storage.redis import RedisStorage
from gateway.storage.sqlite import SqliteStorage
from tests.redis_server import RedisServer, redis_server

__all__ = ["redis_server"]

MAX_BYTES = 100
NAMES = [f"d{number}" for number in range(3)] + [f"f/d{number}" for number in range(3)]
PATIENT_SECONDS = 60.0  # these tests must not fail on a busy machine
_tenants = (f"history{number}" for number in itertools.count())  # all examples share one Redis

steps = st.lists(
    st.one_of(
        st.tuples(st.just("put"), st.sampled_from(NAMES), st.integers(0, 40)),
        st.tuples(st.just("put"), st.sampled_from(NAMES), st.integers(0, 120)),
        st.tuples(st.just("delete"), st.sampled_from(NAMES), st.just(0)),
    ),
    max_size=20,
)


class Model:
    def __init__(self) -> None:
        self.documents: dict[str, Document] = {}  # oldest first

    def put(self, name: str, document: Document) -> bool:
        self.documents.pop(name, None)
        if size_of(name, document) > MAX_BYTES:
            return False
        self.documents[name] = document
        while sum(itertools.starmap(size_of, self.documents.items())) > MAX_BYTES:
            self.documents.pop(next(iter(self.documents)))
        return True


def size_of(name: str, document: Document) -> int:
    return len(name) + len(document.head) + len(document.body)


async def run(storage: Storage, history: list[tuple[str, str, int]]) -> None:
    tenant, model = next(_tenants), Model()
    for number, (kind, name, size) in enumerate(history):
        if kind == "put":
            document = Document(b"%d" % number, b"x" * size)
            stored = await storage.put_document(
                tenant, name, document, ttl_seconds=1000.0 + number, max_bytes=MAX_BYTES
            )
            assert stored == model.put(name, document)
        else:
            assert await storage.delete_document(tenant, name) == (model.documents.pop(name, None) is not None)
        found = [await storage.get_document(tenant, name) for name in NAMES]
        assert found == [model.documents.get(name) for name in NAMES]
        heads = [None if document is None else document.head for document in found]
        assert await storage.get_heads(tenant, NAMES) == heads
        listed = sorted(name for name in model.documents if name.startswith("f/"))
        assert await storage.list_documents(tenant, "f", limit=10) == listed
        later = [name for name in listed if name > NAMES[-2]]
        assert await storage.list_documents(tenant, "f", after=NAMES[-2], limit=10) == later


@pytest.mark.parametrize("engine", ["memory", "sqlite", "redis"])
@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(history=steps)
async def test_every_engine_agrees_with_the_model_over_any_history(
    tmp_path: Path, request: pytest.FixtureRequest, engine: str, history: list[tuple[str, str, int]]
) -> None:
    storage: Storage
    if engine == "memory":
        storage = MemoryStorage()
    elif engine == "sqlite":
        storage = SqliteStorage(f"sqlite:///{tmp_path / 'state.db'}", timeout_seconds=PATIENT_SECONDS)
    else:
        server: RedisServer = request.getfixturevalue("redis_server")
        storage = RedisStorage(server.url, timeout_seconds=PATIENT_SECONDS)
    await storage.open()
    try:
        await run(storage, history)
    finally:
        await storage.close()
