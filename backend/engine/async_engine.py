"""The engine for asyncio: it runs on a thread of its own, and every request has a stream of its outputs.

    event loop                              engine's thread
    submit, abort --> commands -----------> between two steps
    OutputStream  <-- call_soon_threadsafe  once per step, with all outputs of the one before

The thread sleeps on a condition while there is nothing to do. Whatever ends it, it answers every stream on its way
out; a stream that was opened has a last output, and a `submit` after that raises.

A step's outputs wait until the next one is prepared, a fraction of a millisecond on a CPU. While its kernels compute,
the thread does not hold Python's lock, and the event loop has it for itself; the loop would otherwise be woken to wait
for the lock, take it whenever torch lets go of it, and have all cores but one wait for the end of that.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from typing import Self

from backend.engine.engine import Engine, EngineStats
from backend.engine.errors import ContextTooLong, EngineDead, EngineError, QueueFull, RequestRefused
from backend.engine.request import FinishReason, Request, RequestStatus, StepOutput
from backend.engine.scheduler import scheduling_key

__all__ = ["AsyncEngine", "ContextTooLong", "EngineDead", "EngineError", "OutputStream", "QueueFull", "RequestRefused"]

QUIET_SECONDS = 0.2  # without work, before the blocks are checked
STALL_SECONDS = 120.0  # of one step: the longest take a second or so, on a laptop

logger = logging.getLogger(__name__)

Command = Callable[[], StepOutput | None]


class OutputStream(AsyncIterator[StepOutput]):
    """One request's outputs; it ends after the one with `finish_reason`.

    Closing it early, or cancelling whoever waits in it, aborts the request. Who stops reading otherwise must close
    it, as `contextlib.aclosing` does. It holds at most `max_tokens` outputs, however slow the reader.
    """

    def __init__(self, request: Request, abort: Callable[[str], None]) -> None:
        self.request = request
        self._abort = abort
        self._outputs: asyncio.Queue[StepOutput] = asyncio.Queue()
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
        """Closing a stream that has ended is safe and does nothing."""
        if not self._ended:
            self._ended = True
            self._abort(self.request.request_id)

    def deliver(self, output: StepOutput) -> None:
        if not self._ended:
            self._outputs.put_nowait(output)


class AsyncEngine:
    """Owned by one event loop, from `start` to `stop`. `submit`, `abort` and the streams are that loop's alone."""

    def __init__(self, engine: Engine) -> None:
        self.error: str | None = None  # what ended the engine, if anything but `stop` did
        self._engine = engine
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._outbox: list[StepOutput] = []  # the thread's alone
        # A GPU computes meanwhile anyway, and a draft model takes its time before the step begins.
        self._holds_back = engine.config.device.type == "cpu" and engine.config.draft is None
        self._streams: dict[str, OutputStream] = {}  # until the engine's last word on each; the loop's alone
        self._max_unfinished = engine.config.max_num_seqs + engine.config.max_waiting
        # Shared with the thread, under the condition's lock.
        self._changed = threading.Condition()
        self._commands: list[Command] = []
        self._check_due = False  # blocks have moved since they were last proven to be free or cached
        self._idle_waiters: list[asyncio.Future[None]] = []
        self._stopping = False
        self._open = False
        self._step_began: float | None = None  # written by the thread alone

    @property
    def healthy(self) -> bool:
        """Whether requests are taken and worked on: started, not stopped, not ended by an error, and not stuck."""
        return self._open and not self.stalled

    @property
    def stalled(self) -> bool:
        """Whether a step has been running for far too long: there is no way to end it but to end the process."""
        began = self._step_began
        return began is not None and time.monotonic() - began > STALL_SECONDS

    @property
    def engine(self) -> Engine:
        return self._engine

    async def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._open = True
        self._thread.start()

    async def stop(self) -> None:
        """Aborts what is unfinished and joins the thread. Stopping twice, or what has not begun, is safe."""
        with self._changed:
            self._stopping = True
            self._open = False
            self._changed.notify()
        if self._thread.ident is not None:
            await asyncio.to_thread(self._thread.join)

    def submit(self, request: Request) -> OutputStream:
        """Raises `RequestRefused` (or `ContextTooLong`), `QueueFull` or `EngineDead` at once, and then nothing is left
        behind. Otherwise the stream answers, and must be read to its end or closed.

        A full queue gives way to whoever is more urgent than the last in it, who ends with `FinishReason.DISPLACED`.
        """
        self._engine.check(request)
        if request.request_id in self._streams:
            raise RequestRefused(f"request {request.request_id!r} is already here", param="request_id")
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

        Aborting what is unknown or has ended is safe and does nothing.
        """
        with self._changed:
            if self._open:
                self._commands.append(partial(self._engine.abort, request_id))
                self._changed.notify()

    def stop_early(self, request: Request, num_wanted: int) -> None:
        """Ends a request of whose tokens the first so many are an answer, as `abort` does. Once for each: the others,
        and what is computed until the engine hears of this, are counted apart.
        """
        with self._changed:
            if self._open:
                self._commands.append(partial(self._engine.stop_early, request, num_wanted))
                self._changed.notify()

    async def wait_idle(self) -> None:
        """Returns once nothing runs or waits, and at once if the engine has ended."""
        waiter = asyncio.get_running_loop().create_future()
        with self._changed:
            if not self._open:
                return
            self._idle_waiters.append(waiter)
            self._changed.notify()
        await waiter

    def stats(self) -> EngineStats:
        return self._engine.stats()

    # -- the event loop's side, called from the thread -----------------------------------------------------------

    def _displace_for(self, request: Request) -> None:
        """Takes a place in the full queue from the least urgent who waits for a first token. Raises `QueueFull`."""
        unfinished = (stream.request for stream in self._streams.values())
        waiting = [
            other for other in unfinished if other.status is RequestStatus.WAITING and not other.num_output_tokens
        ]
        last = max(waiting, key=scheduling_key, default=request)
        if last.priority <= request.priority:
            raise QueueFull(f"{len(self._streams)} requests are unfinished, and no more are taken")
        # It may begin in this very moment; it is then given up with what little it has.
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
        """The thread's last word: whoever still waits gets an answer."""
        self._deliver([StepOutput(id, (), reason, error=self.error) for id in list(self._streams)])
        self._release(idle_waiters)

    @staticmethod
    def _release(idle_waiters: Sequence[asyncio.Future[None]]) -> None:
        for waiter in idle_waiters:
            if not waiter.done():
                waiter.set_result(None)

    # -- the engine's thread -------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._prepare():
                self._step_began = time.monotonic()
                outputs = self._engine.step(self._flush)
                self._step_began = None
                self._send(outputs)
        except Exception as error:
            logger.exception("the engine ends: a step failed")
            self.error = f"{type(error).__name__}: {error}"
            self._engine.scheduler.fail_all()
        finally:
            with self._changed:
                self._open = False
                waiters = self._take_idle_waiters()
            self._flush()
            reason = FinishReason.ABORT if self.error is None else FinishReason.ERROR
            self._loop.call_soon_threadsafe(self._end, reason, waiters)

    def _prepare(self) -> bool:
        """Carries out what the event loop asked for, and sleeps until there is something to do. False: stop."""
        while True:
            with self._changed:
                quiet = self._sleep()
                commands, self._commands = self._commands, []
                self._engine.interruption.arriving = math.inf
            if quiet:
                self._engine.check_integrity()  # every block must be free or cached now
                self._check_due = False
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

    def _sleep(self) -> bool:
        """Until there is something to do; or True once it has been quiet for long enough to check the blocks.

        The check takes milliseconds with a large pool, which the next request of a single caller must not wait for.
        """
        while not (self._stopping or self._commands or self._engine.has_unfinished):
            self._flush()
            if waiters := self._take_idle_waiters():
                self._loop.call_soon_threadsafe(self._release, waiters)
            if not self._changed.wait(QUIET_SECONDS if self._check_due else None):
                # Between the end of its patience and its turn at the lock, a command may have come.
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
        self._outbox += outputs
        if not self._holds_back:
            self._flush()

    def _flush(self) -> None:
        if self._outbox:
            outputs, self._outbox = self._outbox, []
            self._loop.call_soon_threadsafe(self._deliver, outputs)
