from __future__ import annotations

import asyncio

import pytest

from gateway.core.timers import WaitBound


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
