"""Runs the first step of a coroutine before it is awaited: it may end there, or do its part before other work."""

from __future__ import annotations

import types
from collections.abc import Awaitable, Callable, Generator
from typing import Any, TypeVar, cast

Result = TypeVar("Result")


def begun(awaitable: Awaitable[Result]) -> Awaitable[Result]:
    """Run `awaitable` until it waits for something. Raises its error if it fails before. Await what is returned."""
    steps = awaitable.__await__()
    try:
        waits_for = next(steps)
    except StopIteration as end:
        return _result(end.value)
    return resume(steps, waits_for)


async def _result(value: Result) -> Result:
    return value


@types.coroutine
def resume(steps: Generator[Any, Any, Result], waits_for: Any) -> Generator[Any, Any, Result]:
    """Await a coroutine whose first step the caller has run, like `yield from` after its first step (PEP 380).

    `steps` is the coroutine, and `waits_for` is the result of its first step. A coroutine that ends in its first step,
    which is the common case, then needs no task switch.
    """
    step: Callable[[Any], Any]
    try:
        value = yield waits_for
    except BaseException as error:  # noqa: BLE001 - passed on, as `yield from` does
        step, value = steps.throw, error
    else:
        if value is None:  # as a task sends it
            return (yield from steps)
        step = steps.send
    try:
        waits_for = step(value)
    except StopIteration as end:
        return cast(Result, end.value)
    return (yield from resume(steps, waits_for))
