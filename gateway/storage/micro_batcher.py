"""Many small operations as few batches: one pipeline per event-loop tick, one transaction per group of calls.

What is asked within one tick goes into one batch. While as many batches as allowed are under way, what is asked
gathers and becomes the next one, so batches grow exactly when the store is the bottleneck.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any, Generic, TypeVar

from gateway.core.errors import StorageUnavailable

MAX_BATCH = 256
MAX_WAITING = 10_000

Operation = TypeVar("Operation")


class MicroBatcher(Generic[Operation]):
    """`run` takes a batch and returns one answer per operation, in order; an answer that is an exception is raised.

    When `run` raises, every operation of the batch fails with that. An operation whose caller gave up before its
    batch began is left out; in a batch that has begun, it takes place unheard.
    """

    def __init__(
        self,
        run: Callable[[Sequence[Operation]], Coroutine[Any, Any, Sequence[Any]]],
        *,
        max_in_flight: int,
        timeout_seconds: float,
        store: str,
    ) -> None:
        self._run = run
        self._store = store
        self._max_in_flight = max_in_flight
        self._timeout_seconds = timeout_seconds
        self._in_flight: set[asyncio.Task[Sequence[Any]]] = set()
        self._waiting: deque[tuple[Operation, asyncio.Future[Any]]] = deque()
        self._scheduled = False

    async def submit(self, operation: Operation) -> Any:
        if len(self._waiting) >= MAX_WAITING:
            raise StorageUnavailable(f"{self._store} is too slow: {MAX_WAITING} operations wait for it")
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()
        self._waiting.append((operation, future))
        if not self._scheduled:
            self._scheduled = True
            loop.call_soon(self._launch)
        try:
            async with asyncio.timeout(self._timeout_seconds):
                return await future
        except TimeoutError:
            raise StorageUnavailable(f"{self._store} did not answer in {self._timeout_seconds} s") from None

    async def drain(self) -> None:
        """Wait for the batches that are under way."""
        while self._in_flight:
            await asyncio.wait(self._in_flight)

    def _launch(self) -> None:
        self._scheduled = False
        while self._waiting and len(self._in_flight) < self._max_in_flight:
            batch: list[tuple[Operation, asyncio.Future[Any]]] = []
            while self._waiting and len(batch) < MAX_BATCH:
                operation, future = self._waiting.popleft()
                if not future.done():
                    batch.append((operation, future))
            if batch:
                task = asyncio.get_running_loop().create_task(self._run([operation for operation, _ in batch]))
                self._in_flight.add(task)
                task.add_done_callback(partial(self._answer, [future for _, future in batch]))

    def _answer(self, futures: list[asyncio.Future[Any]], task: asyncio.Task[Sequence[Any]]) -> None:
        self._in_flight.discard(task)
        if task.cancelled():
            answers: Sequence[Any] = [StorageUnavailable(f"{self._store} is being closed")] * len(futures)
        elif (error := task.exception()) is not None:
            answers = [error] * len(futures)
        else:
            answers = task.result()
        for future, answer in zip(futures, answers, strict=True):
            if future.done():
                continue
            if isinstance(answer, BaseException):
                future.set_exception(answer)
            else:
                future.set_result(answer)
        self._launch()
