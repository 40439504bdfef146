"""Groups storage operations of many callers into batches: one Redis pipeline or one SQLite transaction per batch.

Operations submitted within one event-loop tick form one batch. While the maximum number of batches is in flight,
further operations queue up and form the next batch. Batches therefore grow only while the store is the bottleneck.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any, Generic, TypeVar

from gateway.core.errors import StorageUnavailable
from gateway.core.timers import time_bound

MAX_BATCH = 256  # operations in one batch
MAX_QUEUED = 10_000  # operations in the queue

Operation = TypeVar("Operation")


class MicroBatcher(Generic[Operation]):
    """Collects the operations of one event loop into batches, and runs at most `max_in_flight` batches at a time.

    `run` executes a batch and returns one result per operation, in order. A result that is an exception is raised to
    that operation's caller. If `run` raises, all operations of the batch fail with that exception. `store` is the
    store's name in error messages.

    If a caller is cancelled or times out before its batch starts, its operation is dropped. In a batch that has
    started, the operation takes effect and its result is discarded.
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
        self._queue: deque[tuple[Operation, asyncio.Future[Any]]] = deque()
        self._scheduled = False

    async def submit(self, operation: Operation) -> Any:
        """Run an operation in the next batch, and return the operation's result.

        Raises `StorageUnavailable` if the queue is full, or if no result arrives within `timeout_seconds`. Time during
        which the event loop does not run does not count, because the store may have answered meanwhile.
        """
        if len(self._queue) >= MAX_QUEUED:
            raise StorageUnavailable(f"{self._store} is too slow: {MAX_QUEUED} operations are queued")
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()
        self._queue.append((operation, future))
        if not self._scheduled:
            self._scheduled = True
            loop.call_soon(self._launch)
        try:
            async with time_bound(self._timeout_seconds):
                return await future
        except TimeoutError:
            if future.done() and not future.cancelled():  # the answer arrived in the instant of the timeout
                return future.result()
            raise StorageUnavailable(f"{self._store} did not answer within {self._timeout_seconds} s") from None

    async def drain(self) -> None:
        """Wait until no batch is in flight."""
        while self._in_flight:
            await asyncio.wait(self._in_flight)

    def _launch(self) -> None:
        self._scheduled = False
        while self._queue and len(self._in_flight) < self._max_in_flight:
            batch: list[tuple[Operation, asyncio.Future[Any]]] = []
            while self._queue and len(batch) < MAX_BATCH:
                operation, future = self._queue.popleft()
                if not future.done():  # a done future means that its caller was cancelled or timed out
                    batch.append((operation, future))
            if batch:
                task = asyncio.get_running_loop().create_task(self._run([operation for operation, _ in batch]))
                self._in_flight.add(task)
                task.add_done_callback(partial(self._resolve, [future for _, future in batch]))

    def _resolve(self, futures: list[asyncio.Future[Any]], task: asyncio.Task[Sequence[Any]]) -> None:
        self._in_flight.discard(task)
        if task.cancelled():
            results: Sequence[Any] = [StorageUnavailable(f"{self._store} is being closed")] * len(futures)
        elif (error := task.exception()) is not None:
            results = [error] * len(futures)
        else:
            results = task.result()
        for future, result in zip(futures, results, strict=True):
            if future.done():  # the caller was cancelled or timed out
                continue
            if isinstance(result, BaseException):
                future.set_exception(result)
            else:
                future.set_result(result)
        self._launch()
