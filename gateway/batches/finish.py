"""The end of a batch: its results become an output file and an error file, in the order of its lines.

A result has been billed: it comes into its file, whatever has become of the rest and of the input file.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import NamedTuple

import msgspec

from gateway.batches.lines import read_line
from gateway.batches.records import Batch, File, LineError, Result, Status, new_id
from gateway.batches.store import CHUNK_BYTES, Store

RESULTS_PER_PAGE = 200
UNANSWERED = {
    Status.CANCELLED: ("batch_cancelled", "The batch was cancelled before this request was answered."),
    Status.EXPIRED: ("batch_expired", "This request could not be answered before the completion window ended."),
    Status.FAILED: ("batch_failed", "The batch failed before this request was answered."),
}


def answer_line(custom_id: str, call_id: str, status: int, body: bytes) -> bytes:
    """A line with a reply, whatever it says; `body` is JSON, and loses its line ends."""
    response = {"status_code": status, "request_id": call_id, "body": msgspec.Raw(_one_line(body))}
    return msgspec.json.encode({"id": _result_id(call_id), "custom_id": custom_id, "response": response, "error": None})


def unanswered_line(custom_id: str, call_id: str, ending: Status) -> bytes:
    code, message = UNANSWERED[ending]
    error = {"code": code, "message": message}
    return msgspec.json.encode({"id": _result_id(call_id), "custom_id": custom_id, "response": None, "error": error})


def _result_id(call_id: str) -> str:
    return f"batch_req_{call_id.removeprefix('batch_')}"


def _one_line(body: bytes) -> bytes:
    return msgspec.json.format(body, indent=-1) if b"\n" in body or b"\r" in body else body


class _Writer:
    """One of the two files; it comes to be with its first line."""

    def __init__(self, store: Store, batch: Batch, name: str) -> None:
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


class Written(NamedTuple):
    output: File | None
    errors: File | None
    lines: int


async def write_files(
    store: Store, batch: Batch, lines: AsyncIterator[tuple[int, int, bytes]], *, now: float, keep_seconds: float
) -> Written:
    """The contents of the files are in the store then. `lines` are those of the input file."""
    output, errors = _Writer(store, batch, "output"), _Writer(store, batch, "error")
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
    while result is not None:
        await (output if result.ok else errors).put(result.content)
        result = await anext(results, None)
    return Written(await output.end(now, keep_seconds), await errors.end(now, keep_seconds), count)


async def _all_results(store: Store, batch_id: str) -> AsyncIterator[Result]:
    after = 0
    while page := await store.results(batch_id, after_line=after, limit=RESULTS_PER_PAGE):
        for result in page:
            yield result
        after = page[-1].line
