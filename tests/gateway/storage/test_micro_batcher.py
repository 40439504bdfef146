from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from gateway.core.errors import StorageUnavailable
from gateway.storage import micro_batcher
from gateway.storage.micro_batcher import MicroBatcher

PATIENT_SECONDS = 60.0


class Recorder:
    """Answers each number with its double, as soon as the gate is open."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.begun = asyncio.Event()

    async def run(self, batch: Sequence[int]) -> Sequence[Any]:
        self.batches.append(list(batch))
        self.begun.set()
        await self.gate.wait()
        return [ValueError(str(number)) if number < 0 else 2 * number for number in batch]


async def test_one_tick_is_one_batch() -> None:
    recorder = Recorder()
    coalescer = MicroBatcher(recorder.run, max_in_flight=4, timeout_seconds=PATIENT_SECONDS, store="the store")
    assert await asyncio.gather(*(coalescer.submit(number) for number in range(100))) == list(range(0, 200, 2))
    assert recorder.batches == [list(range(100))]


async def test_what_comes_while_all_are_under_way_is_the_next_batch() -> None:
    recorder = Recorder()
    recorder.gate.clear()
    coalescer = MicroBatcher(recorder.run, max_in_flight=1, timeout_seconds=PATIENT_SECONDS, store="the store")
    first = asyncio.create_task(coalescer.submit(1))
    await recorder.begun.wait()
    others = [asyncio.create_task(coalescer.submit(number)) for number in (2, 3)]
    await asyncio.sleep(0)
    recorder.gate.set()
    assert await asyncio.gather(first, *others) == [2, 4, 6]
    assert recorder.batches == [[1], [2, 3]]


async def test_a_mistake_is_its_own_caller_s() -> None:
    coalescer = MicroBatcher(Recorder().run, max_in_flight=1, timeout_seconds=PATIENT_SECONDS, store="the store")
    answers = await asyncio.gather(coalescer.submit(1), coalescer.submit(-1), return_exceptions=True)
    assert answers[0] == 2
    assert isinstance(answers[1], ValueError)


async def test_a_failed_batch_fails_all_of_it() -> None:
    async def run(batch: Sequence[int]) -> Sequence[Any]:
        raise StorageUnavailable("gone")

    coalescer = MicroBatcher(run, max_in_flight=1, timeout_seconds=PATIENT_SECONDS, store="the store")
    answers = await asyncio.gather(coalescer.submit(1), coalescer.submit(2), return_exceptions=True)
    assert [str(answer) for answer in answers] == ["gone", "gone"]


async def test_nobody_waits_longer_than_the_bound() -> None:
    recorder = Recorder()
    recorder.gate.clear()
    coalescer = MicroBatcher(recorder.run, max_in_flight=1, timeout_seconds=0.05, store="the store")
    with pytest.raises(StorageUnavailable, match="the store did not answer"):
        await coalescer.submit(1)
    with pytest.raises(StorageUnavailable):  # still waiting for its turn: never run at all
        await coalescer.submit(2)
    recorder.gate.set()
    await coalescer.drain()
    assert await coalescer.submit(3) == 6
    assert recorder.batches == [[1], [3]]


async def test_the_queue_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(micro_batcher, "MAX_WAITING", 2)
    recorder = Recorder()
    recorder.gate.clear()
    coalescer = MicroBatcher(recorder.run, max_in_flight=1, timeout_seconds=PATIENT_SECONDS, store="the store")
    first = asyncio.create_task(coalescer.submit(0))
    await recorder.begun.wait()
    waiting = [asyncio.create_task(coalescer.submit(number)) for number in (1, 2)]
    await asyncio.sleep(0)
    with pytest.raises(StorageUnavailable, match="too slow"):
        await coalescer.submit(3)
    recorder.gate.set()
    assert await asyncio.gather(first, *waiting) == [0, 2, 4]
