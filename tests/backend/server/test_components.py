"""What all endpoints share: prompts are prepared in the tenant's turn if their bodies are large."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace
from typing import cast

from backend.server.components import MAX_INLINE_BYTES, PREPARING, ServerComponents
from backend.server.tenant_queue import TenantQueue


async def test_tenants_take_turns_when_large_bodies_are_prepared() -> None:
    queue = TenantQueue(PREPARING, "test", "requests wait to be tokenised")
    components = cast(ServerComponents, SimpleNamespace(preparing=queue))
    release, prepared = threading.Event(), list[str]()

    async def prepare(salt: str | None, size_bytes: int = MAX_INLINE_BYTES + 1) -> None:
        def work() -> None:
            if threading.current_thread() is not threading.main_thread():
                release.wait()
            prepared.append(salt or "")

        await ServerComponents.prepare(components, salt, size_bytes, work)

    hostile = [asyncio.create_task(prepare("hostile")) for _ in range(10)]
    await asyncio.sleep(0)
    innocent = asyncio.create_task(prepare("innocent"))
    await asyncio.sleep(0)
    await prepare(None, MAX_INLINE_BYTES)
    assert prepared == [""], "a small body waits for none"
    release.set()
    await asyncio.gather(*hostile, innocent)
    assert prepared.index("innocent") <= PREPARING.running + 2
    queue.close()
