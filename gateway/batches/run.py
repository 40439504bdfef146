"""Runs one batch, in the gateway that owns its lease: validate, process the lines, write the output files.

Each step starts from the state in the store, so a gateway that takes a batch over continues where the last owner was
killed. A run reads the whole input file once to validate it and to order its lines by prompt prefix. Then
`batches.concurrency` tasks call the lines that have no result, in that order. `result_writer` guarantees that no answer
is lost or billed twice. At the end, `output_files` writes the results to files, and one update ends the batch.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field

import msgspec

from gateway.batches.line_call import LineReply, call_line
from gateway.batches.lines import ENDPOINTS, ERRORS_MAX, LineSplitter, RequestLine, read_line, validate_line
from gateway.batches.output_files import response_line, unanswered_line, write_files
from gateway.batches.records import Batch, BatchStatus, File, LineError, LineResult
from gateway.batches.result_writer import ResultWriter, result_of
from gateway.batches.runtime import BatchRuntime, LeaseLost
from gateway.batches.stores.base import CHUNK_BYTES, Change
from gateway.core.errors import RETRY_AFTER_MAX_SECONDS, StorageUnavailable
from gateway.core.ids import random_bytes

WAIT_STATUSES = frozenset({429, 503})  # no capacity yet; waiting for capacity does not count as a failed attempt
BACKOFF_FIRST_SECONDS = 0.5
BACKOFF_MAX_SECONDS = 30.0
INPUT_GONE = LineError("invalid_file", "the input file was deleted", param="input_file_id")
TURN_SECONDS = 0.002  # longest time spent on the lines of a file before other tasks run


class _Draining(Exception):
    """The gateway drains. The next owner of the batch calls the lines that have no result."""


@dataclass
class _InputScan:
    """The result of one pass over the complete input file."""

    errors: list[LineError] = field(default_factory=list)
    input_gone: bool = False
    models: set[str] = field(default_factory=set)
    lines: list[tuple[bytes, int, int, int]] = field(default_factory=list)  # prefix key, number, offset, bytes


class BatchRun:
    """Runs one batch from its claim to its end. Every write raises `LeaseLost` if another gateway owns the batch."""

    def __init__(self, runtime: BatchRuntime, batch: Batch) -> None:
        self.batch = batch
        self._runtime = runtime
        self._store = runtime.store
        self._input_scan: _InputScan | None = None  # from validation until the lines are ordered
        self._draining = False
        self.lines_running = 0  # lines in flight
        self._ending: BatchStatus | None = None  # why the lines are stopped early
        self._lines_task: asyncio.Task[None] | None = None
        self.results = ResultWriter(runtime, batch.id, self._update)
        self._resume_at = 0.0  # event-loop time at which capacity may be free, from the last retry-after

    async def run(self) -> None:
        """Run until the batch ends or the gateway drains.

        Raises `LeaseLost` if another gateway owns the batch, or `StorageUnavailable`, maybe in an exception group.
        """
        if self.batch.status is BatchStatus.VALIDATING:
            await self._validate()
        await self.results.recover(since=self.batch.created_at)
        if self.batch.status is BatchStatus.IN_PROGRESS and self._ending is None:
            await self._process_lines()
        if self.batch.has_ended or self._draining:
            return
        await self._finish()

    def stop(self, ending: BatchStatus) -> None:
        """Cancel all lines, because the batch was cancelled, its window has ended, or its input file was deleted.

        `ending` is the batch's final status. If `stop` is called twice, the first `ending` is used.
        """
        if self._ending is None:
            self._ending = ending
            if self._lines_task is not None:
                self._lines_task.cancel()

    def drain(self) -> None:
        """Let the lines in flight finish, and start no other lines."""
        self._draining = True

    @property
    def lines_waiting(self) -> int:
        """Number of lines that neither have a result nor are in flight."""
        batch = self.batch
        if batch.status is not BatchStatus.IN_PROGRESS:
            return 0
        return batch.total - batch.completed - batch.failed - self.results.unwritten - self.lines_running

    async def _update(
        self,
        change: Change,
        results: Sequence[LineResult] = (),
        recorded: Sequence[int] = (),
        files: Sequence[File] = (),
    ) -> None:
        after = await self._store.update(self.batch.id, change, results=results, recorded=recorded, files=files)
        if after is None:
            raise LeaseLost(self.batch.id)
        self.batch = after

    # Validation

    async def _validate(self) -> None:
        scan = await self._read_input()

        def next_status(batch: Batch) -> Batch | None:
            if batch.owner != self._runtime.owner:
                return None
            if batch.status is not BatchStatus.VALIDATING:  # it was cancelled meanwhile
                return msgspec.structs.replace(batch, total=len(scan.lines))
            now = self._runtime.clock()
            if scan.errors:
                return batch.entered(BatchStatus.FAILED, now, errors=tuple(scan.errors))
            model = next(iter(scan.models)) if len(scan.models) == 1 else None
            return batch.entered(BatchStatus.IN_PROGRESS, now, total=len(scan.lines), model=model)

        await self._update(next_status)

    async def _read_input(self) -> _InputScan:
        """Read and validate all lines. After validation, only `lines` and `input_gone` of the result still matter."""
        scan = _InputScan()
        policy = self._runtime.components.policies.current
        principal = await self._runtime.components.authenticator.principal_of(self.batch.key_id, policy)
        if principal is None:
            scan.errors.append(LineError("invalid_api_key", "the API key that created the batch is no longer valid"))
            if self.batch.status is BatchStatus.VALIDATING:
                return scan
        async for number, offset, raw in self._scan():
            found = validate_line(number, raw, self.batch, principal, policy)
            if found.error is not None and len(scan.errors) < ERRORS_MAX:
                scan.errors.append(found.error)
            if found.model:
                scan.models.add(found.model)
            scan.lines.append((found.prefix, number, offset, len(raw)))
        # A file is deleted together with its content. If the file still exists now, the pass has read all of it.
        scan.input_gone = await self._store.file(self.batch.input_file_id) is None
        if scan.input_gone:
            scan.errors.insert(0, INPUT_GONE)
        self._input_scan = scan
        return scan

    async def _scan(self) -> AsyncIterator[tuple[int, int, bytes]]:
        """Yield the (number, offset, line) of each line in the input file. Lets other tasks run in between."""
        splitter = LineSplitter(self._runtime.components.max_body_bytes)
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

    # Processing

    async def _process_lines(self) -> None:
        """Call every line that has no result, until all have one, the window ends, or `stop` is called."""
        lines_task = self._lines_task = asyncio.create_task(self._all_lines(), name=f"lines of {self.batch.id}")
        left_seconds = max(0.0, self.batch.expires_at - self._runtime.clock())
        expiry = asyncio.get_running_loop().call_later(left_seconds, self.stop, BatchStatus.EXPIRED)
        try:
            await lines_task
        except asyncio.CancelledError:
            if self._ending is None:  # this task was cancelled, and not only the lines
                raise
        finally:
            expiry.cancel()
            lines_task.cancel()
            await asyncio.wait([lines_task])
            await self.results.flush_all()

    async def _all_lines(self) -> None:
        scan = self._input_scan or await self._read_input()
        if scan.input_gone:
            self.stop(BatchStatus.FAILED)
            return
        finished = set(await self._store.finished_lines(self.batch.id))
        # Sorted by prefix key, so that prompts with a common prefix follow each other while it is cached.
        in_order = sorted(scan.lines)
        left = iter([(number, offset, length) for _, number, offset, length in in_order if number not in finished])
        self._input_scan = None
        async with asyncio.TaskGroup() as tasks:
            for _ in range(self._runtime.concurrency):
                tasks.create_task(self._call_lines(left))

    async def _call_lines(self, left: Iterator[tuple[int, int, int]]) -> None:
        """Call lines taken from the iterator `left`, which all tasks of the batch share."""
        for number, offset, length in left:
            raw = await self._line_at(offset, length)
            line = read_line(number, raw)
            if isinstance(line, LineError):  # the line was valid before, so the input file was deleted since then
                self.stop(BatchStatus.FAILED)
                return
            try:
                result = await self._answer(number, line)
            except _Draining:
                return
            self.results.add(result)
            await self.results.flush()

    async def _line_at(self, offset: int, length: int) -> bytes:
        parts = [
            await self._store.read(self.batch.input_file_id, start, min(CHUNK_BYTES, offset + length - start))
            for start in range(offset, offset + length, CHUNK_BYTES)
        ]
        return b"".join(parts)

    async def _answer(self, number: int, line: RequestLine) -> LineResult:
        """Call a line until its reply is final, or `batches.attempts` attempts have failed.

        Raises `_Draining` if the gateway drains first.
        """
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
                or failures >= self._runtime.components.policies.current.batches.attempts
            ):
                return _result(number, line, call_id, reply)
            self._runtime.components.call_log.abandon(call_id)
            if reply.status in WAIT_STATUSES:
                self._resume_at = asyncio.get_running_loop().time() + _retry_after_seconds(reply)
            else:
                await asyncio.sleep(min(BACKOFF_FIRST_SECONDS * 2 ** (failures - 1), BACKOFF_MAX_SECONDS))
        raise _Draining

    @property
    def _root(self) -> str | None:
        """The outermost known ancestor of the batch's tenant."""
        components = self._runtime.components
        try:
            tenant = components.authenticator.tenant(self.batch.tenant, components.policies.current)
        except StorageUnavailable:
            return None
        return None if tenant is None else tenant.root

    async def _call(self, number: int, line: RequestLine, call_id: str) -> LineReply:
        reply, endpoint = LineReply(), ENDPOINTS[line.url]
        try:
            async with self._runtime.slots.slot(self.batch.tenant, self._root):
                self.lines_running += 1
                try:
                    await call_line(
                        self._runtime.components,
                        endpoint,
                        bytes(line.body),
                        reply,
                        key_id=self.batch.key_id,
                        call_id=call_id,
                    )
                finally:
                    self.lines_running -= 1
        except asyncio.CancelledError:
            # If the batch ends, the line is not called again, so the tokens generated so far are billed.
            if self._ending is not None and reply.receipt is not None:
                content = unanswered_line(line.custom_id, call_id, self._ending)
                self.results.add(result_of(number, False, content, reply.receipt))
            else:
                self._runtime.components.call_log.abandon(call_id)
            raise
        return reply

    # The end

    async def _finish(self) -> None:
        """Write the files, and end the batch with the status in `ending`."""

        def finalizing(batch: Batch) -> Batch | None:
            if batch.owner != self._runtime.owner:
                return None
            if batch.status is not BatchStatus.IN_PROGRESS:  # cancelling, or killed while finalizing
                return batch
            ending = self._ending or BatchStatus.COMPLETED
            errors = (INPUT_GONE,) if ending is BatchStatus.FAILED else ()
            return batch.entered(BatchStatus.FINALIZING, self._runtime.clock(), ending=ending, errors=errors)

        await self._update(finalizing)
        await self.results.record_all_receipts()
        now, keep = self._runtime.clock(), self._runtime.components.policies.current.batches.keep
        written = await write_files(self._store, self.batch, self._scan(), now=now, keep_seconds=keep)

        def ended(batch: Batch) -> Batch | None:
            if batch.owner != self._runtime.owner:
                return None
            total = max(written.lines, batch.total)  # a deleted input file has no lines to count
            return batch.entered(
                batch.ending,
                now,
                total=total,
                failed=total - batch.completed,
                output_file_id=written.output.id if written.output else None,
                error_file_id=written.errors.id if written.errors else None,
            )

        await self._update(ended, files=[file for file in (written.output, written.errors) if file is not None])


def _result(number: int, line: RequestLine, call_id: str, reply: LineReply) -> LineResult:
    content = response_line(line.custom_id, call_id, reply.status, reply.body)
    return result_of(number, reply.status == 200, content, reply.receipt)


def _retry_after_seconds(reply: LineReply) -> float:
    header = reply.headers.get("retry-after-ms", "")
    return min(int(header) / 1000, RETRY_AFTER_MAX_SECONDS) if header.isdigit() else BACKOFF_FIRST_SECONDS
