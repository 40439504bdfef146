from __future__ import annotations

import asyncio
import time

import pytest

from gateway.core.timers import WaitBound, time_bound


async def bounded_wait(bound: WaitBound) -> None:
    bound.begin()
    try:
        await asyncio.Event().wait()
    except asyncio.CancelledError:
        if not bound.expired:
            raise
        bound.uncancel()
        raise TimeoutError from None
    finally:
        bound.end()


async def test_a_wait_that_is_too_long_is_cancelled_and_marked_expired() -> None:
    bound = WaitBound(0.01)
    with pytest.raises(TimeoutError):
        await bounded_wait(bound)
    task = asyncio.current_task()
    assert task is not None and task.cancelling() == 0
    bound.close()


async def test_waits_are_still_checked_after_one_expired() -> None:
    bound = WaitBound(0.01)
    for _ in range(3):
        with pytest.raises(TimeoutError):
            await bounded_wait(bound)
    bound.close()


async def test_many_short_waits_do_not_expire() -> None:
    bound = WaitBound(0.05)
    for _ in range(30):
        bound.begin()
        await asyncio.sleep(0.005)
        bound.end()
    assert not bound.expired
    bound.close()


async def test_the_time_between_waits_does_not_count() -> None:
    bound = WaitBound(0.01)
    await asyncio.sleep(0.03)
    assert not bound.expired
    bound.close()


async def test_a_deadline_ends_a_wait_however_short() -> None:
    bound = WaitBound(60.0, asyncio.get_running_loop().time() + 0.01)
    with pytest.raises(TimeoutError):
        await bounded_wait(bound)
    bound.close()


async def test_a_deadline_that_passes_between_two_waits_ends_the_next_one() -> None:
    loop = asyncio.get_running_loop()
    bound = WaitBound(60.0, loop.time() + 0.01)
    await asyncio.sleep(0.02)  # longer than the deadline, without a wait
    with pytest.raises(TimeoutError):
        await bounded_wait(bound)
    bound.close()


async def test_a_cancellation_from_elsewhere_does_not_set_expired() -> None:
    bounds: list[WaitBound] = []

    async def wait() -> None:
        bounds.append(WaitBound(60.0))
        await bounded_wait(bounds[0])

    task = asyncio.create_task(wait())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    bounds[0].close()


async def test_a_closed_bound_does_not_expire() -> None:
    bound = WaitBound(0.01)
    bound.begin()
    bound.close()
    await asyncio.sleep(0.03)
    assert not bound.expired


async def test_time_during_which_the_loop_does_not_run_does_not_count() -> None:
    answer = asyncio.get_running_loop().create_future()
    bound = WaitBound(0.5)
    wait = asyncio.create_task(_answered(bound, answer))
    await asyncio.sleep(0.03)  # the checks have begun
    time.sleep(1.0)  # noqa: ASYNC251 (the loop does not run, although an answer may arrive)
    await asyncio.sleep(0.03)
    assert not wait.done()
    answer.set_result(None)
    await wait
    bound.close()


async def _answered(bound: WaitBound, answer: asyncio.Future[None]) -> None:
    bound.begin()
    await answer
    bound.end()


async def test_a_wait_that_began_during_the_delay_keeps_its_whole_time() -> None:
    other, bound = WaitBound(60.0), WaitBound(0.5)
    other.begin()  # keeps the checks going
    await asyncio.sleep(0.03)
    time.sleep(0.3)  # noqa: ASYNC251
    task = asyncio.create_task(bounded_wait(bound))
    await asyncio.sleep(0)
    began = asyncio.get_running_loop().time()
    with pytest.raises(TimeoutError):
        await task
    assert asyncio.get_running_loop().time() - began >= 0.5
    other.close()
    bound.close()


async def test_a_time_bound_ends_its_block_and_nothing_else() -> None:
    with pytest.raises(TimeoutError):
        async with time_bound(0.01):
            await asyncio.Event().wait()
    task = asyncio.current_task()
    assert task is not None and task.cancelling() == 0
    async with time_bound(60.0):
        await asyncio.sleep(0)


async def test_a_time_bound_passes_on_a_cancellation_from_elsewhere() -> None:
    async def wait() -> None:
        async with time_bound(60.0):
            await asyncio.Event().wait()

    task = asyncio.create_task(wait())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_time_bound_works_in_a_task_that_is_being_cancelled() -> None:
    async def clean_up() -> str:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            try:
                async with time_bound(0.01):
                    await asyncio.Event().wait()
            except TimeoutError:
                return "timed out"
            raise
        return ""

    task = asyncio.create_task(clean_up())
    await asyncio.sleep(0)
    task.cancel()
    assert await task == "timed out"
