"""Writes a batch's output file and error file, in the order of its lines.

A stored result has been billed. The result is therefore always written to its file, even if the batch failed or its
input file was deleted.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import NamedTuple

import msgspec

from gateway.batches.lines import read_line
from gateway.batches.records import Batch, BatchStatus, File, LineError, LineResult, new_id
from gateway.batches.stores.base import CHUNK_BYTES, BatchStore

RESULTS_PER_PAGE = 200
# OpenAI's error code and message for a line without an answer, for each status with which a batch ends early.
UNANSWERED = {
    BatchStatus.CANCELLED: ("batch_cancelled", "The batch was cancelled before this request was answered."),
    BatchStatus.EXPIRED: ("batch_expired", "This request could not be answered before the completion window ended."),
    BatchStatus.FAILED: ("batch_failed", "The batch failed before this request was answered."),
}


def response_line(custom_id: str, call_id: str, status: int, body: bytes) -> bytes:
    """Return the output line of a request that got a reply of any status. `body` is JSON. Its newlines are removed."""
    response = {"status_code": status, "request_id": call_id, "body": msgspec.Raw(_one_line(body))}
    return msgspec.json.encode({"id": _result_id(call_id), "custom_id": custom_id, "response": response, "error": None})


def unanswered_line(custom_id: str, call_id: str, ending: BatchStatus) -> bytes:
    """Return the error line of a request that got no reply, because its batch ended with `ending`."""
    code, message = UNANSWERED[ending]
    error = {"code": code, "message": message}
    return msgspec.json.encode({"id": _result_id(call_id), "custom_id": custom_id, "response": None, "error": error})


def _result_id(call_id: str) -> str:
    return f"batch_req_{call_id.removeprefix('batch_')}"


def _one_line(body: bytes) -> bytes:
    return msgspec.json.format(body, indent=-1) if b"\n" in body or b"\r" in body else body


class _FileWriter:
    """Writes one of the two files in chunks. The file exists only if it has a line."""

    def __init__(self, store: BatchStore, batch: Batch, name: str) -> None:
        self._store = store
        self._batch = batch
        self._name = name
        self._pending = bytearray()
        self.id = new_id("file-")
        self.bytes = 0

    async def put(self, line: bytes) -> None:
        self._pending += line + b"\n"
        while len(self._pending) >= CHUNK_BYTES:
            await self._write(bytes(self._pending[:CHUNK_BYTES]))

    async def _write(self, chunk: bytes) -> None:
        await self._store.append(self.id, chunk)
        self.bytes += len(chunk)
        del self._pending[: len(chunk)]

    async def end(self, now: float, keep_seconds: float) -> File | None:
        if self._pending:
            await self._write(bytes(self._pending))
        if not self.bytes:
            return None
        return File(
            id=self.id,
            tenant=self._batch.tenant,
            filename=f"{self._batch.id}_{self._name}.jsonl",
            purpose="batch_output",
            bytes=self.bytes,
            created_at=int(now),
            expires_at=int(now + (self._batch.output_expires_seconds or keep_seconds)),
        )


class OutputFiles(NamedTuple):
    """The written files, None for one without lines, and the number of lines in the input file."""

    output: File | None
    errors: File | None
    lines: int


async def write_files(
    store: BatchStore, batch: Batch, lines: AsyncIterator[tuple[int, int, bytes]], *, now: float, keep_seconds: float
) -> OutputFiles:
    """Write the contents of both files to the store. The caller adds the file records when it ends the batch.

    `lines` are (number, offset, line) of the input file. A line without a result becomes an error line. `now` is in
    seconds since the epoch.
    """
    output, errors = _FileWriter(store, batch, "output"), _FileWriter(store, batch, "error")
    results = _all_results(store, batch.id)
    result = await anext(results, None)
    count = 0
    async for number, _, raw in lines:
        count += 1
        if result is not None and result.line == number:
            await (output if result.ok else errors).put(result.content)
            result = await anext(results, None)
            continue
        line = read_line(number, raw)
        custom_id = "" if isinstance(line, LineError) else line.custom_id
        await errors.put(unanswered_line(custom_id, f"{batch.id}-{number}", batch.ending))
    # Results remain here only if the input file was deleted, so its lines could not be read.
    while result is not None:
        await (output if result.ok else errors).put(result.content)
        result = await anext(results, None)
    return OutputFiles(await output.end(now, keep_seconds), await errors.end(now, keep_seconds), count)


async def _all_results(store: BatchStore, batch_id: str) -> AsyncIterator[LineResult]:
    after = 0
    while page := await store.results(batch_id, after_line=after, limit=RESULTS_PER_PAGE):
        for result in page:
            yield result
        after = page[-1].line
