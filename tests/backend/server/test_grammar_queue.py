"""The queue of compilations: bounded, and fair between tenants."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

import pytest

from backend.server import grammar_queue
from backend.server.errors import GrammarsBusy
from backend.server.grammar_queue import COMPILES_PER_SALT, GrammarQueue


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0)


async def test_a_tenant_that_fills_its_queue_delays_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_queue, "MAX_QUEUED_PER_SALT", 3)
    queue, release = GrammarQueue(), threading.Event()
    blocked = [asyncio.create_task(queue.run("hostile", release.wait)) for _ in range(COMPILES_PER_SALT + 3)]
    await until(lambda: sum(map(len, queue._queued.values())) == 3)
    with pytest.raises(GrammarsBusy, match="3 of your requests"):
        await queue.run("hostile", release.wait)
    assert await queue.run("innocent", lambda: 7) == 7
    release.set()
    assert await asyncio.gather(*blocked) == [True] * len(blocked)
    assert (queue._running, queue._queued) == ({}, {})
    queue.close()


async def test_a_full_queue_displaces_a_request_of_the_tenant_with_most(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_queue, "MAX_QUEUED", 4)
    monkeypatch.setattr(grammar_queue, "COMPILES_AT_ONCE", 1)
    queue, release = GrammarQueue(), threading.Event()
    blocked = [asyncio.create_task(queue.run("hostile", release.wait)) for _ in range(5)]
    await until(lambda: sum(map(len, queue._queued.values())) == 4)
    innocent = asyncio.create_task(queue.run("innocent", lambda: 7))
    with pytest.raises(GrammarsBusy, match="most of them yours"):
        await blocked[-1]
    with pytest.raises(GrammarsBusy):
        await queue.run("hostile", release.wait)
    release.set()
    assert await innocent == 7
    await asyncio.gather(*blocked[:-1])
    queue.close()


async def test_a_request_that_is_cancelled_leaves_the_queue() -> None:
    queue, release = GrammarQueue(), threading.Event()
    tasks = [asyncio.create_task(queue.run("one", release.wait)) for _ in range(COMPILES_PER_SALT + 1)]
    await until(lambda: sum(map(len, queue._queued.values())) == 1)
    tasks[-1].cancel()
    with pytest.raises(asyncio.CancelledError):
        await tasks[-1]
    release.set()
    await asyncio.gather(*tasks[:-1])
    assert (queue._running, queue._queued) == ({}, {})
    queue.close()
