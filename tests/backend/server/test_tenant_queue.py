"""Queues of work in threads: bounded, and fair between tenants."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable

import pytest

from backend.server.errors import TenantBusy
from backend.server.tenant_queue import QueueBounds, TenantQueue


class Queue(TenantQueue):
    """With work that runs until it is released."""

    def __init__(self, running: int, running_per_tenant: int, waiting: int, waiting_per_tenant: int) -> None:
        super().__init__(
            QueueBounds(running, running_per_tenant, waiting, waiting_per_tenant), "test", "pieces of work wait"
        )
        self.release = threading.Event()
        self.begun: list[str] = []

    def block(self, salt: str, count: int) -> list[asyncio.Task[str]]:
        return [asyncio.create_task(self.run(salt, lambda: self._blocked(salt))) for _ in range(count)]

    def _blocked(self, salt: str) -> str:
        self.begun.append(salt)
        self.release.wait()
        return salt

    async def until_waiting(self, count: int) -> None:
        await until(lambda: sum(map(len, self._waiting.values())) == count)

    @property
    def is_empty(self) -> bool:
        return not self._running and not self._waiting


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0)


@pytest.fixture
async def queue() -> AsyncIterator[Queue]:
    """Two of four threads for a tenant, and room for three that wait of a tenant and five of all."""
    made = Queue(4, 2, 5, 3)
    yield made
    made.release.set()
    made.close()


async def test_a_tenant_that_fills_its_queue_delays_no_other(queue: Queue) -> None:
    blocked = queue.block("hostile", 2 + 3)
    await queue.until_waiting(3)
    with pytest.raises(TenantBusy, match="3 of your pieces of work wait"):
        await queue.run("hostile", lambda: None)
    assert await queue.run("innocent", lambda: 7) == 7
    queue.release.set()
    assert await asyncio.gather(*blocked) == ["hostile"] * 5
    assert queue.is_empty


async def test_a_full_queue_displaces_work_of_the_tenant_with_most(queue: Queue) -> None:
    blocked = queue.block("other", 4)
    blocked += queue.block("hostile", 5)
    await queue.until_waiting(5)
    innocent = asyncio.create_task(queue.run("innocent", lambda: 7))
    with pytest.raises(TenantBusy, match="5 pieces of work wait, most of them yours"):
        await blocked[-1]
    with pytest.raises(TenantBusy, match="most of them yours"):
        await queue.run("other", lambda: None)
    queue.release.set()
    assert await innocent == 7
    assert await asyncio.gather(*blocked[:-1]) == ["other"] * 4 + ["hostile"] * 4
    assert queue.is_empty


async def test_tenants_take_turns() -> None:
    queue = Queue(1, 1, 9, 9)
    tasks = [*queue.block("a", 4), *queue.block("b", 2), *queue.block("c", 1)]
    await queue.until_waiting(6)
    queue.release.set()
    await asyncio.gather(*tasks)
    assert queue.begun == ["a", "a", "b", "c", "a", "b", "a"]
    queue.close()


async def test_a_turn_lasts_until_the_end_of_its_block(queue: Queue) -> None:
    async with queue.turn("one"), queue.turn("one"):
        waiting = asyncio.create_task(queue.run("one", lambda: 7))
        await queue.until_waiting(1)
        assert await queue.run("other", lambda: 8) == 8
        assert not waiting.done()
    assert await waiting == 7
    assert queue.is_empty


async def test_work_that_is_cancelled_leaves_the_queue(queue: Queue) -> None:
    tasks = queue.block("one", 3)
    await queue.until_waiting(1)
    tasks[-1].cancel()
    with pytest.raises(asyncio.CancelledError):
        await tasks[-1]
    queue.release.set()
    await asyncio.gather(*tasks[:-1])
    assert queue.is_empty


async def test_work_that_is_cancelled_as_its_turn_comes_passes_it_on(queue: Queue) -> None:
    async with queue.turn("one"):
        async with queue.turn("one"):
            cancelled = asyncio.create_task(queue.run("one", lambda: 7))
            next_one = asyncio.create_task(queue.run("one", lambda: 8))
            await queue.until_waiting(2)
        cancelled.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        assert await next_one == 8
    assert queue.is_empty
