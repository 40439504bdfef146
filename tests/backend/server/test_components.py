"""What all endpoints share: large bodies are prepared in threads, of which no tenant has all."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace
from typing import cast

from backend.server.components import MAX_INLINE_BYTES, PREPARING, ServerComponents
from backend.server.tenant_queue import TenantQueue


async def test_a_tenant_with_many_large_bodies_leaves_a_thread_to_others() -> None:
    queue = TenantQueue(PREPARING, "test", "requests wait to be tokenised")
    components = cast(ServerComponents, SimpleNamespace(preparing=queue))
    release, begun, prepared = threading.Event(), list[str](), list[str]()

    async def prepare(salt: str | None, size_bytes: int = MAX_INLINE_BYTES + 1) -> None:
        def work() -> None:
            begun.append(salt or "")
            if threading.current_thread() is not threading.main_thread():
                release.wait()
            prepared.append(salt or "")

        await ServerComponents.prepare(components, salt, size_bytes, work)

    hostile = [asyncio.create_task(prepare("hostile")) for _ in range(10)]
    await asyncio.sleep(0)
    innocent = asyncio.create_task(prepare("innocent"))
    async with asyncio.timeout(60):
        while len(begun) < 2:
            await asyncio.sleep(0.001)
    assert sorted(begun) == ["hostile", "innocent"], "the first of the others is still prepared"
    await prepare(None, MAX_INLINE_BYTES)
    assert prepared == [""], "a small body waits for none"
    release.set()
    await asyncio.gather(*hostile, innocent)
    assert len(prepared) == 12
    queue.close()
