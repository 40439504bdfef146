"""The life of one batch, in the hands of the gateway that has its lease: validate, work, finish.

Every step begins with what the store says, so that a gateway that takes a batch over goes on where the last one was
killed. `results` has what then holds of answers and bills.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field

import msgspec

from gateway.batches.finish import answer_line, unanswered_line, write_files
from gateway.batches.inside import Reply, call
from gateway.batches.lines import ENDPOINTS, ERRORS_TOLD_MAX, Line, LineSplitter, judge, read_line
from gateway.batches.records import Batch, File, LineError, Result, Status
from gateway.batches.results import Results, result_of
from gateway.batches.store import CHUNK_BYTES, Change
from gateway.batches.workshop import LeaseLost, Workshop
from gateway.core.errors import RETRY_AFTER_MAX_SECONDS
from gateway.core.ids import random_bytes

WAIT_STATUSES = frozenset({429, 503})  # no room yet: waiting for that is no failed try
BACKOFF_FIRST_SECONDS = 0.5
BACKOFF_MAX_SECONDS = 30.0
INPUT_GONE = LineError("invalid_file", "the input file is gone", param="input_file_id")
TURN_SECONDS = 0.002  # spent on lines of a file before others on the event loop get their turn


class _Later(Exception):
    """The gateway drains: what is not done is for the next one."""


@dataclass
class _Judged:
    """What a reading of the whole input file has shown."""

    errors: list[LineError] = field(default_factory=list)
    input_gone: bool = False
    models: set[str] = field(default_factory=set)
    lines: list[tuple[bytes, int, int, int]] = field(default_factory=list)  # prefix key, number, offset, bytes


class Run:
    def __init__(self, shop: Workshop, batch: Batch) -> None:
        self.batch = batch
        self._shop = shop
        self._store = shop.store
        self._judged: _Judged | None = None
        self._draining = False
        self.lines_running = 0  # that are called now
        self._ending: Status | None = None  # why the work is stopped before its end
        self._lanes: asyncio.Task[None] | None = None
        self.results = Results(shop, batch.id, self._update)
        self._resume_at = 0.0  # event-loop seconds: a limit or a queue has said when there may be room

    async def live(self) -> None:
        """Until the batch is over, or somebody else's. Raises `LeaseLost` or `StorageUnavailable`, maybe in a group."""
        if self.batch.status is Status.VALIDATING:
            await self._validate()
        await self.results.take_over(since=self.batch.created_at)
        if self.batch.status is Status.IN_PROGRESS and self._ending is None:
            await self._work()
        if self.batch.over or self._draining:
            return
        await self._finish()

    def stop(self, ending: Status) -> None:
        """No more lines: it has been cancelled, its window is over, or its input file is gone."""
        if self._ending is None:
            self._ending = ending
            if self._lanes is not None:
                self._lanes.cancel()

    def drain(self) -> None:
        """Lines in flight may end, and no others begin."""
        self._draining = True

    @property
    def lines_waiting(self) -> int:
        """That are neither done nor called now."""
        batch = self.batch
        if batch.status is not Status.IN_PROGRESS:
            return 0
        return batch.total - batch.completed - batch.failed - self.results.unwritten - self.lines_running

    async def _update(
        self, change: Change, results: Sequence[Result] = (), paid: Sequence[int] = (), files: Sequence[File] = ()
    ) -> None:
        after = await self._store.update(self.batch.id, change, results=results, paid=paid, files=files)
        if after is None:
            raise LeaseLost(self.batch.id)
        self.batch = after

    # Validation

    async def _validate(self) -> None:
        judged = await self._judge()

        def next_status(batch: Batch) -> Batch | None:
            if batch.owner != self._shop.owner:
                return None
            if batch.status is not Status.VALIDATING:  # it has been cancelled
                return msgspec.structs.replace(batch, total=len(judged.lines))
            now = self._shop.clock()
            if judged.errors:
                return batch.entered(Status.FAILED, now, errors=tuple(judged.errors))
            model = next(iter(judged.models)) if len(judged.models) == 1 else None
            return batch.entered(Status.IN_PROGRESS, now, total=len(judged.lines), model=model)

        await self._update(next_status)

    async def _judge(self) -> _Judged:
        """Of a batch that is worked on already, only `lines` and `input_gone` still matter."""
        judged = _Judged()
        policy = self._shop.components.policies.current
        principal = await self._shop.components.authenticator.principal_of(self.batch.key_id, policy)
        if principal is None:
            judged.errors.append(LineError("invalid_api_key", "the key that created the batch is not valid any more"))
            if self.batch.status is Status.VALIDATING:
                return judged
        async for number, offset, raw in self._scan():
            verdict = judge(number, raw, self.batch, principal, policy)
            if verdict.error is not None and len(judged.errors) < ERRORS_TOLD_MAX:
                judged.errors.append(verdict.error)
            if verdict.model:
                judged.models.add(verdict.model)
            judged.lines.append((verdict.prefix, number, offset, len(raw)))
        # A file goes with its content: as long as it is there, what was read was all of it.
        judged.input_gone = await self._store.file(self.batch.input_file_id) is None
        if judged.input_gone:
            judged.errors.insert(0, INPUT_GONE)
        self._judged = judged
        return judged

    async def _scan(self) -> AsyncIterator[tuple[int, int, bytes]]:
        """(number, offset, line) of the whole input file; others on the event loop get their turns between."""
        splitter = LineSplitter(self._shop.components.max_body_bytes)
        offset, turn = 0, time.perf_counter()
        while chunk := await self._store.read(self.batch.input_file_id, offset, CHUNK_BYTES):
            offset += len(chunk)
            for found in splitter.feed(chunk):
                yield found
                if time.perf_counter() - turn > TURN_SECONDS:
                    await asyncio.sleep(0)
                    turn = time.perf_counter()
        for found in splitter.end():
            yield found

    # Work

    async def _work(self) -> None:
        """Every line that has no result, until all have, or the work is stopped."""
        lanes = self._lanes = asyncio.create_task(self._all_lines(), name=f"lines of {self.batch.id}")
        left_seconds = max(0.0, self.batch.expires_at - self._shop.clock())
        expiry = asyncio.get_running_loop().call_later(left_seconds, self.stop, Status.EXPIRED)
        try:
            await lanes
        except asyncio.CancelledError:
            if self._ending is None:
                raise
        finally:
            expiry.cancel()
            lanes.cancel()
            await asyncio.wait([lanes])
            await self.results.all_written()

    async def _all_lines(self) -> None:
        judged = self._judged or await self._judge()
        if judged.input_gone:
            self.stop(Status.FAILED)
            return
        done = set(await self._store.done(self.batch.id))
        in_order = sorted(judged.lines)
        left = iter([(number, offset, length) for _, number, offset, length in in_order if number not in done])
        self._judged = None
        async with asyncio.TaskGroup() as lanes:
            for _ in range(self._shop.concurrency):
                lanes.create_task(self._lane(left))

    async def _lane(self, left: Iterator[tuple[int, int, int]]) -> None:
        for number, offset, length in left:
            raw = await self._line_at(offset, length)
            line = read_line(number, raw)
            if isinstance(line, LineError):  # it was none when the batch was validated
                self.stop(Status.FAILED)
                return
            try:
                result = await self._answer(number, line)
            except _Later:
                return
            self.results.add(result)
            await self.results.written()

    async def _line_at(self, offset: int, length: int) -> bytes:
        parts = [
            await self._store.read(self.batch.input_file_id, start, min(CHUNK_BYTES, offset + length - start))
            for start in range(offset, offset + length, CHUNK_BYTES)
        ]
        return b"".join(parts)

    async def _answer(self, number: int, line: Line) -> Result:
        """Call until there is an answer to keep. Raises `_Later` where that is not to be here and now."""
        failures = 0
        while not self._draining:
            if (wait := self._resume_at - asyncio.get_running_loop().time()) > 0:
                await asyncio.sleep(wait)
                continue
            call_id = f"{self.batch.id}-{number}-{random_bytes(3).hex()}"
            reply = await self._call(number, line, call_id)
            failures += reply.status not in WAIT_STATUSES
            if (
                reply.headers.get("x-should-retry") != "true"
                or failures >= self._shop.components.policies.current.batches.attempts
            ):
                return _result(number, line, call_id, reply)
            self._shop.components.call_log.abandon(call_id)
            if reply.status in WAIT_STATUSES:
                self._resume_at = asyncio.get_running_loop().time() + _retry_after_seconds(reply)
            else:
                await asyncio.sleep(min(BACKOFF_FIRST_SECONDS * 2 ** (failures - 1), BACKOFF_MAX_SECONDS))
        raise _Later

    async def _call(self, number: int, line: Line, call_id: str) -> Reply:
        reply, endpoint = Reply(), ENDPOINTS[line.url]
        try:
            async with self._shop.slots:
                self.lines_running += 1
                try:
                    key_id = self.batch.key_id
                    await call(self._shop.components, endpoint, bytes(line.body), reply, key_id=key_id, call_id=call_id)
                finally:
                    self.lines_running -= 1
        except asyncio.CancelledError:
            if self._ending is not None and reply.receipt is not None:  # nobody will call it again
                content = unanswered_line(line.custom_id, call_id, self._ending)
                self.results.add(result_of(number, False, content, reply.receipt))
            else:
                self._shop.components.call_log.abandon(call_id)
            raise
        return reply

    # The end

    async def _finish(self) -> None:
        def finalizing(batch: Batch) -> Batch | None:
            if batch.owner != self._shop.owner:
                return None
            if batch.status is not Status.IN_PROGRESS:  # cancelling, or it was finalizing when its owner was killed
                return batch
            ending = self._ending or Status.COMPLETED
            errors = (INPUT_GONE,) if ending is Status.FAILED else ()
            return batch.entered(Status.FINALIZING, self._shop.clock(), ending=ending, errors=errors)

        await self._update(finalizing)
        await self.results.all_paid()
        now, keep = self._shop.clock(), self._shop.components.policies.current.batches.keep
        written = await write_files(self._store, self.batch, self._scan(), now=now, keep_seconds=keep)

        def ended(batch: Batch) -> Batch | None:
            if batch.owner != self._shop.owner:
                return None
            total = max(written.lines, batch.total)  # of an input file that is gone, no lines are there any more
            return batch.entered(
                batch.ending,
                now,
                total=total,
                failed=total - batch.completed,
                output_file_id=written.output.id if written.output else None,
                error_file_id=written.errors.id if written.errors else None,
            )

        await self._update(ended, files=[file for file in (written.output, written.errors) if file is not None])


def _result(number: int, line: Line, call_id: str, reply: Reply) -> Result:
    content = answer_line(line.custom_id, call_id, reply.status, reply.body)
    return result_of(number, reply.status == 200, content, reply.receipt)


def _retry_after_seconds(reply: Reply) -> float:
    told = reply.headers.get("retry-after-ms", "")
    return min(int(told) / 1000, RETRY_AFTER_MAX_SECONDS) if told.isdigit() else BACKOFF_FIRST_SECONDS
