"""MicroBatcher: which operations form a batch, and who gets which error."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

import pytest

from gateway.core.errors import StorageUnavailable
from gateway.storage import micro_batcher
from gateway.storage.micro_batcher import MicroBatcher

PATIENT_SECONDS = 60.0


class Recorder:
    """Doubles each number of a batch, once the gate is open. Negative numbers give a `ValueError`."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.started = asyncio.Event()

    async def run(self, batch: Sequence[int]) -> Sequence[Any]:
        self.batches.append(list(batch))
        self.started.set()
        await self.gate.wait()
        return [ValueError(str(number)) if number < 0 else 2 * number for number in batch]


async def test_operations_of_one_tick_form_one_batch() -> None:
    recorder = Recorder()
    batcher = MicroBatcher(recorder.run, max_in_flight=4, timeout_seconds=PATIENT_SECONDS, store="the store")
    assert await asyncio.gather(*(batcher.submit(number) for number in range(100))) == list(range(0, 200, 2))
    assert recorder.batches == [list(range(100))]


async def test_operations_submitted_while_all_batches_are_in_flight_form_the_next_one() -> None:
    recorder = Recorder()
    recorder.gate.clear()
    batcher = MicroBatcher(recorder.run, max_in_flight=1, timeout_seconds=PATIENT_SECONDS, store="the store")
    first = asyncio.create_task(batcher.submit(1))
    await recorder.started.wait()
    others = [asyncio.create_task(batcher.submit(number)) for number in (2, 3)]
    await asyncio.sleep(0)
    recorder.gate.set()
    assert await asyncio.gather(first, *others) == [2, 4, 6]
    assert recorder.batches == [[1], [2, 3]]


async def test_an_exception_result_is_raised_to_its_own_caller_only() -> None:
    batcher = MicroBatcher(Recorder().run, max_in_flight=1, timeout_seconds=PATIENT_SECONDS, store="the store")
    results = await asyncio.gather(batcher.submit(1), batcher.submit(-1), return_exceptions=True)
    assert results[0] == 2
    assert isinstance(results[1], ValueError)


async def test_a_failed_batch_fails_all_its_operations() -> None:
    async def run(batch: Sequence[int]) -> Sequence[Any]:
        raise StorageUnavailable("gone")

    batcher = MicroBatcher(run, max_in_flight=1, timeout_seconds=PATIENT_SECONDS, store="the store")
    results = await asyncio.gather(batcher.submit(1), batcher.submit(2), return_exceptions=True)
    assert [str(result) for result in results] == ["gone", "gone"]


async def test_no_operation_waits_longer_than_the_timeout() -> None:
    recorder = Recorder()
    recorder.gate.clear()
    batcher = MicroBatcher(recorder.run, max_in_flight=1, timeout_seconds=0.05, store="the store")
    with pytest.raises(StorageUnavailable, match="the store did not answer"):
        await batcher.submit(1)
    with pytest.raises(StorageUnavailable):  # still queued, so it never runs
        await batcher.submit(2)
    recorder.gate.set()
    await batcher.drain()
    assert await batcher.submit(3) == 6
    assert recorder.batches == [[1], [3]]


async def test_the_queue_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(micro_batcher, "MAX_QUEUED", 2)
    recorder = Recorder()
    recorder.gate.clear()
    batcher = MicroBatcher(recorder.run, max_in_flight=1, timeout_seconds=PATIENT_SECONDS, store="the store")
    first = asyncio.create_task(batcher.submit(0))
    await recorder.started.wait()
    waiting = [asyncio.create_task(batcher.submit(number)) for number in (1, 2)]
    await asyncio.sleep(0)
    with pytest.raises(StorageUnavailable, match="too slow"):
        await batcher.submit(3)
    recorder.gate.set()
    assert await asyncio.gather(first, *waiting) == [0, 2, 4]


async def test_the_delay_of_a_busy_event_loop_is_not_the_stores() -> None:
    recorder = Recorder()
    recorder.gate.clear()
    batcher = MicroBatcher(recorder.run, max_in_flight=1, timeout_seconds=0.25, store="the store")
    waiting = [asyncio.create_task(batcher.submit(number)) for number in range(10)]
    await asyncio.sleep(0.03)
    recorder.gate.set()  # the store has answered, but its answer is not read while the loop is busy
    for _ in range(5):
        time.sleep(0.3)  # noqa: ASYNC251
        await asyncio.sleep(0)
    assert await asyncio.gather(*waiting) == list(range(0, 20, 2))
