"""The first step of a coroutine, run before it is awaited."""

from __future__ import annotations

import asyncio
from collections.abc import Generator

import pytest

from gateway.core.first_step import begun, resume


async def test_the_first_step_runs_at_once_and_the_rest_when_awaited() -> None:
    steps: list[str] = []
    gate = asyncio.Event()

    async def work() -> int:
        steps.append("first")
        await gate.wait()
        steps.append("second")
        await asyncio.sleep(0)
        return 3

    rest = begun(work())
    assert steps == ["first"]
    asyncio.get_running_loop().call_soon(gate.set)
    assert await rest == 3
    assert steps == ["first", "second"]


async def test_a_coroutine_that_does_not_wait_has_its_result() -> None:
    async def work() -> int:
        return 3

    assert await begun(work()) == 3


async def test_an_error_in_the_first_step_is_raised_at_once() -> None:
    async def work() -> int:
        raise ValueError("first")

    with pytest.raises(ValueError, match="first"):
        begun(work())


async def test_an_error_after_the_first_step_is_raised_when_awaited() -> None:
    async def work() -> int:
        await asyncio.sleep(0)
        raise ValueError("second")

    rest = begun(work())
    with pytest.raises(ValueError, match="second"):
        await rest


async def test_a_cancellation_reaches_the_coroutine_wherever_it_waits() -> None:
    ended: list[str] = []

    async def work(waits: int) -> None:
        try:
            for _ in range(waits):
                await asyncio.sleep(0)
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            await asyncio.sleep(0)  # cleans up, which may take several steps
            await asyncio.sleep(0)
            ended.append("cancelled")
            raise

    async def awaits(waits: int) -> None:
        await begun(work(waits))

    for waits in range(3):
        task = asyncio.create_task(awaits(waits))
        for _ in range(waits + 1):
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert ended == ["cancelled"] * 3


async def test_a_coroutine_may_handle_an_error_that_it_gets_and_return() -> None:
    async def work() -> str:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            return "handled"
        return "ended"

    async def awaits() -> str:
        return await begun(work())

    task = asyncio.create_task(awaits())
    await asyncio.sleep(0)
    task.cancel()
    assert await task == "handled"


def test_values_that_are_sent_reach_the_coroutine() -> None:
    def work() -> Generator[int, str, str]:
        return (yield 1) + (yield 2) + (yield 3)

    steps = work()
    rest = resume(steps, next(steps))
    assert next(rest) == 1
    assert [rest.send("a"), rest.send("b")] == [2, 3]
    with pytest.raises(StopIteration) as end:
        rest.send("c")
    assert end.value.value == "abc"
