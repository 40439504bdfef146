"""The engine for asyncio: it runs on its own thread, and every request has a stream of outputs.

    event loop                              engine's thread
    submit, abort --> commands -----------> executed between two steps
    OutputStream  <-- call_soon_threadsafe  once per step, with all outputs of the previous one

The thread sleeps on a condition while there is nothing to do. However it ends, it answers every open stream: each gets
a last output, and a `submit` after that raises.

On a CPU, a step's outputs are delivered when the kernels of the next step start, a fraction of a millisecond later.
While they run, the engine's thread does not hold the GIL, and the event loop has it to itself. Delivered at once, the
outputs would wake the loop while the engine's thread needs the GIL to prepare the next step. The loop would take it
whenever torch releases it, and all cores but one would wait for the loop.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, Self, TypeVar

from backend.engine.engine import Engine
from backend.engine.engine_stats import EngineStats
from backend.engine.errors import ContextTooLong, EngineDead, EngineError, QueueFull, RequestRefused
from backend.engine.kernel_swap import KernelSwap
from backend.engine.outputs import FinishReason, StepOutput
from backend.engine.request import Request, RequestStatus
from backend.engine.scheduler import scheduling_key

__all__ = ["AsyncEngine", "ContextTooLong", "EngineDead", "EngineError", "OutputStream", "QueueFull", "RequestRefused"]

IDLE_CHECK_SECONDS = 0.2  # without work, before the integrity of the block pool is checked
STALL_SECONDS = 120.0  # for one step: the longest take about a second on a laptop

logger = logging.getLogger(__name__)

T = TypeVar("T")
Command = Callable[[], StepOutput | None]


class OutputStream(AsyncIterator[StepOutput]):
    """The outputs of one request. Ends after the output with `finish_reason`. Either iterate over it, or `listen`.

    Closing the stream early, or cancelling a task that waits in it, aborts the request. A reader that stops for any
    other reason must close it, for example with `contextlib.aclosing`. The stream buffers at most `max_tokens` outputs,
    however slow the reader is.
    """

    def __init__(self, request: Request, abort: Callable[[str], None]) -> None:
        self.request = request
        self._abort = abort
        self._outputs: asyncio.Queue[StepOutput] = asyncio.Queue()
        self._listener: Callable[[StepOutput], None] | None = None
        self._ended = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> StepOutput:
        if self._ended:
            raise StopAsyncIteration
        try:
            output = await self._outputs.get()
        except asyncio.CancelledError:
            await self.aclose()
            raise
        self._ended = output.finish_reason is not None
        return output

    async def aclose(self) -> None:
        """Closes the stream, and aborts the request if it has not ended. Otherwise does nothing."""
        if not self._ended:
            self._ended = True
            self._abort(self.request.request_id)

    def listen(self, listener: Callable[[StepOutput], None]) -> None:
        """Calls `listener` with each output as soon as it is delivered, and now with those that have been.

        Cheaper than to iterate, because no task is woken. The listener must not raise.
        """
        self._listener = listener
        while not self._outputs.empty():
            self.deliver(self._outputs.get_nowait())

    def deliver(self, output: StepOutput) -> None:
        """Adds an output, unless the stream has been closed."""
        if self._ended:
            return
        if self._listener is None:
            self._outputs.put_nowait(output)
        else:
            self._ended = output.finish_reason is not None
            self._listener(output)


class AsyncEngine:
    """Runs an `Engine` on a thread, from `start` to `stop`.

    Belongs to one event loop: `submit`, `abort` and the streams may be used in that loop only.
    """

    def __init__(self, engine: Engine) -> None:
        self.error: str | None = None  # the error that ended the engine, if `stop` did not
        self._engine = engine
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._outbox: list[StepOutput] = []  # used by the engine's thread only
        # Not with a GPU, which computes without the host anyway, nor with a draft model, which runs before the step.
        self._defers_outputs = engine.config.device.type == "cpu" and engine.config.draft is None
        self._streams: dict[str, OutputStream] = {}  # until the last output of each; used by the event loop only
        self._max_unfinished = engine.config.max_num_seqs + engine.config.max_waiting
        # Shared by both threads, under the condition's lock.
        self._changed = threading.Condition()
        self._commands: list[Command] = []
        self._calls: set[Future[Any]] = set()  # that have not returned
        self._check_due = False  # steps have run since the last integrity check
        self._idle_waiters: list[asyncio.Future[None]] = []
        self._stopping = False
        self._open = False
        self._step_began: float | None = None  # written by the engine's thread only
        self._kernel_swap = KernelSwap(engine, self._run_between_steps) if engine.config.starts_with_torch else None

    @property
    def healthy(self) -> bool:
        """Whether requests are accepted and processed: started, not stopped, not ended by an error, not stalled."""
        return self._open and not self.stalled

    @property
    def stalled(self) -> bool:
        """Whether a step has been running for more than STALL_SECONDS. Only ending the process can end it."""
        began = self._step_began
        return began is not None and time.monotonic() - began > STALL_SECONDS

    @property
    def engine(self) -> Engine:
        return self._engine

    async def start(self) -> None:
        """Starts the engine's thread."""
        self._loop = asyncio.get_running_loop()
        self._open = True
        self._engine.runner.model.watch(self.fail)
        self._thread.start()
        if self._kernel_swap:
            self._kernel_swap.start()

    async def stop(self) -> None:
        """Aborts all unfinished requests and joins the thread. Safe to call twice, or without `start`."""
        with self._changed:
            self._stopping = True
            self._open = False
            self._changed.notify()
        if self._kernel_swap:
            await asyncio.to_thread(self._kernel_swap.stop)
        if self._thread.ident is not None:
            await asyncio.to_thread(self._thread.join)
        await asyncio.to_thread(self._engine.runner.model.close)

    def submit(self, request: Request) -> OutputStream:
        """Queues a request. The stream must be read to its end or closed.

        Raises `RequestRefused` (or `ContextTooLong`), `QueueFull` or `EngineDead` at once, and then keeps no state.
        If the queue is full and its last request is less urgent, that one is removed with `FinishReason.DISPLACED`.
        """
        self._engine.check(request)
        if request.request_id in self._streams:
            raise RequestRefused(f"a request with the id {request.request_id!r} is already running", param="request_id")
        with self._changed:
            if not self._open:
                raise EngineDead(self.error or "the engine is not running")
            if len(self._streams) >= self._max_unfinished:
                self._displace_for(request)
            self._commands.append(partial(self._add, request))
            interruption = self._engine.interruption
            interruption.arriving = min(interruption.arriving, request.priority)
            self._changed.notify()
        stream = self._streams[request.request_id] = OutputStream(request, self.abort)
        return stream

    def abort(self, request_id: str) -> None:
        """Ends a request before the next step. Its stream, if still open, ends with `FinishReason.ABORT`.

        Does nothing if the request is unknown or has ended.
        """
        with self._changed:
            if self._open:
                self._commands.append(partial(self._engine.abort, request_id))
                self._changed.notify()

    def stop_early(self, request: Request, num_wanted: int) -> None:
        """Ends a request before the next step, because its first `num_wanted` output tokens are the whole answer.

        To be called once per request. The tokens after these, including those computed until the engine executes this,
        are counted as unwanted.
        """
        with self._changed:
            if self._open:
                self._commands.append(partial(self._engine.stop_early, request, num_wanted))
                self._changed.notify()

    async def wait_idle(self) -> None:
        """Returns once no request is running or waiting, and at once if the engine has ended."""
        waiter = asyncio.get_running_loop().create_future()
        with self._changed:
            if not self._open:
                return
            self._idle_waiters.append(waiter)
            self._changed.notify()
        await waiter

    def stats(self) -> EngineStats:
        """The engine's current state and totals. Safe to call from any thread."""
        return self._engine.stats()

    def call(self, work: Callable[[], T]) -> Future[T]:
        """Runs `work` on the engine's thread between two steps. Safe to call from any thread.

        The future raises `EngineDead` if the engine ends before. An exception of `work` ends the engine, as one of a
        step does, because the block pool may be inconsistent then.
        """
        future: Future[T] = Future()

        def command() -> None:
            if future.set_running_or_notify_cancel():
                self._flush()  # `work` may take longer than a step's preparation
                future.set_result(work())
            with self._changed:
                self._calls.discard(future)

        with self._changed:
            if self._open:
                self._calls.add(future)
                self._commands.append(command)
                self._changed.notify()
                return future
        future.set_exception(EngineDead(self.error or "the engine is not running"))
        return future

    # -- On the event loop ---------------------------------------------------------------------------------------

    def _displace_for(self, request: Request) -> None:
        """Removes the least urgent request without a token, if it is less urgent than this one. Raises `QueueFull`."""
        unfinished = (stream.request for stream in self._streams.values())
        waiting = [
            other for other in unfinished if other.status is RequestStatus.WAITING and not other.num_output_tokens
        ]
        last = max(waiting, key=scheduling_key, default=request)
        if last.priority <= request.priority:
            raise QueueFull(f"the queue is full: {len(self._streams)} requests are unfinished")
        # The engine's thread may be starting it right now. It is aborted all the same, with what little it has.
        self._commands.append(partial(self._engine.abort, last.request_id, FinishReason.DISPLACED))
        self._deliver([StepOutput(last.request_id, finish_reason=FinishReason.DISPLACED)])

    def _deliver(self, outputs: Sequence[StepOutput]) -> None:
        for output in outputs:
            stream = self._streams.get(output.request_id)
            if stream is None:
                continue
            if output.finish_reason is not None:
                del self._streams[output.request_id]
            stream.deliver(output)

    def _end(self, reason: FinishReason, idle_waiters: Sequence[asyncio.Future[None]]) -> None:
        """Called when the thread ends: answers everything that still waits."""
        self._deliver([StepOutput(id, (), reason, error=self.error) for id in list(self._streams)])
        self._release(idle_waiters)

    @staticmethod
    def _release(idle_waiters: Sequence[asyncio.Future[None]]) -> None:
        for waiter in idle_waiters:
            if not waiter.done():
                waiter.set_result(None)

    # -- On other threads ----------------------------------------------------------------------------------------

    def fail(self, error: str) -> None:
        """Ends the engine with an error and answers all open streams, even if a step never returns."""
        with self._changed:
            if not self._open:
                return
            logger.error("The engine has stopped: %s", error)
            self.error = error
            self._open, self._stopping = False, True
            waiters = self._take_idle_waiters()
            self._changed.notify()
        self._loop.call_soon_threadsafe(self._end, FinishReason.ERROR, waiters)

    def _run_between_steps(self, work: Callable[[], None]) -> None:
        """Runs `work` on the engine's thread between two steps, unless the engine stops."""

        def command() -> None:
            self._flush()  # `work` takes longer than a step's preparation
            work()

        with self._changed:
            if self._open:
                self._commands.append(command)
                self._changed.notify()

    # -- On the engine's thread ----------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._prepare_step():
                self._step_began = time.monotonic()
                outputs = self._engine.step(self._flush)
                self._step_began = None
                self._send(outputs)
        except Exception as error:
            logger.exception("The engine has stopped because a step failed")
            self.error = self.error or f"{type(error).__name__}: {error}"
            self._engine.scheduler.fail_all()
        finally:
            self._engine.close()
            with self._changed:
                self._open = False
                waiters = self._take_idle_waiters()
                calls, self._calls = self._calls, set()
            for call in calls:
                if call.running() or call.set_running_or_notify_cancel():
                    call.set_exception(EngineDead(self.error or "the engine has stopped"))
            self._flush()
            reason = FinishReason.ABORT if self.error is None else FinishReason.ERROR
            self._loop.call_soon_threadsafe(self._end, reason, waiters)

    def _prepare_step(self) -> bool:
        """Executes the event loop's commands, and sleeps until there is a step to run. Returns False to stop."""
        while True:
            with self._changed:
                is_idle = self._wait_for_work()
                commands, self._commands = self._commands, []
                self._engine.interruption.arriving = math.inf
            if is_idle:
                self._engine.check_integrity()  # with no request left, every block must be free
                self._check_due = self._engine.runner.use_idle_time()
                continue
            if self._stopping:
                commands = [partial(self._engine.abort, id) for id in self._engine.scheduler.request_ids]
            self._send([output for command in commands if (output := command()) is not None])
            self._send(self._engine.expire(time.time()))
            if self._stopping:
                return False
            if self._engine.has_unfinished:
                self._check_due = True
                return True

    def _wait_for_work(self) -> bool:
        """Sleeps until there is something to do. Returns True if an integrity check is due instead.

        The check runs after IDLE_CHECK_SECONDS without work, because it takes milliseconds with a large pool, and the
        next request of a single client must not wait for it. It is repeated as long as the runner uses the time.
        """
        while not (self._stopping or self._commands or self._engine.has_unfinished):
            self._flush()
            if waiters := self._take_idle_waiters():
                self._loop.call_soon_threadsafe(self._release, waiters)
            if not self._changed.wait(IDLE_CHECK_SECONDS if self._check_due else None):
                # A command may have arrived between the timeout and the moment the lock was acquired again.
                return not (self._stopping or self._commands)
        return False

    def _take_idle_waiters(self) -> list[asyncio.Future[None]]:
        waiters, self._idle_waiters = self._idle_waiters, []
        return waiters

    def _add(self, request: Request) -> StepOutput | None:
        try:
            self._engine.add(request)
        except EngineError as error:
            return StepOutput(request.request_id, (), FinishReason.ERROR, error=error.message)
        return None

    def _send(self, outputs: Sequence[StepOutput]) -> None:
        """Collects outputs, and hands them to the event loop now unless they are deferred."""
        self._outbox += outputs
        if not self._defers_outputs:
            self._flush()

    def _flush(self) -> None:
        """Hands all collected outputs to the event loop."""
        if self._outbox:
            outputs, self._outbox = self._outbox, []
            self._loop.call_soon_threadsafe(self._deliver, outputs)
