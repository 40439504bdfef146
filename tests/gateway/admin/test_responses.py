"""DELETE /admin/responses/{tenant}."""

from __future__ import annotations

from pathlib import Path

import httpx2
import pytest
from starlette.applications import Starlette

from gateway import idempotency, response_store
from gateway.admin.responses import response_routes
from gateway.background import events
from gateway.core.errors import StorageUnavailable
from gateway.endpoints.replies import EXCEPTION_HANDLERS
from gateway.storage.base import DELETE_BATCH_SIZE, Document
from gateway.storage.memory import MemoryStorage
from tests.gateway.admin.test_requests import ADMIN_KEY
from tests.gateway.auth.registries import a_registry
from tests.gateway.harness import policy_of
from tests.gateway.server.application import running


async def delete(storage: MemoryStorage, tenant: str) -> httpx2.Response:
    routes = response_routes(storage, lambda tenant: (tenant,), a_registry(storage))
    app = Starlette(routes=routes, exception_handlers=EXCEPTION_HANDLERS)
    async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app=app), base_url="http://admin") as client:
        return await client.delete(f"/admin/responses/{tenant}")


async def test_all_responses_of_one_tenant_are_deleted() -> None:
    storage = MemoryStorage()
    for tenant, count in (("a/b", 2 * DELETE_BATCH_SIZE), ("a", 3), ("c", 1)):
        for number in range(count):
            document = Document(b"said", b"told")
            await storage.put_document(tenant, f"resp_{number}", document, ttl_seconds=60.0, max_bytes=10**6)
    for tenant, count in (("a/b", 2 * DELETE_BATCH_SIZE), ("a/b", 0), ("a", 3), ("nobody", 0)):
        reply = await delete(storage, tenant)
        assert (reply.status_code, reply.json()) == (200, {"tenant": tenant, "deleted": count})
    assert await storage.get_document("c", "resp_0") is not None


async def test_documents_of_all_kinds_are_deleted(tmp_path: Path) -> None:
    kinds = [
        getattr(module, name)
        for module in (idempotency, response_store, events)
        for name in vars(module)
        if name.endswith("_space") and getattr(module, name).__module__ == module.__name__
    ]
    assert len(kinds) == 5
    async with running(tmp_path, policy_of(), admin_port=0, admin_key=ADMIN_KEY) as app:
        storage, admin = app.gateway._parts.storage, app.gateway.admin
        for space in ("t", *(kind("t") for kind in kinds)):
            await storage.put_document(space, "a", Document(b"said", b"told"), ttl_seconds=60.0, max_bytes=100)
        async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app=admin), base_url="http://admin") as client:
            reply = await client.delete("/admin/responses/t", headers={"authorization": f"Bearer {ADMIN_KEY}"})
        assert reply.json() == {"tenant": "t", "deleted": 6}


async def test_an_unavailable_storage_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    async def away(self: MemoryStorage, tenant: str) -> int:
        raise StorageUnavailable("the storage is away")

    monkeypatch.setattr(MemoryStorage, "delete_some_documents", away)
    assert (await delete(MemoryStorage(), "a")).status_code == 503
