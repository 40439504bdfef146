"""A batch runtime on a `Rig` of real components: scripted deployments, a SQLite store, and batches added by hand."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from gateway.auth.key_ids import KeyIdAuthenticator
from gateway.batches.line_call import BatchCanonicaliser
from gateway.batches.records import Batch, BatchStatus, File, new_id
from gateway.batches.run import BatchRun
from gateway.batches.runtime import BatchRuntime
from gateway.batches.stores.base import CHUNK_BYTES
from gateway.batches.stores.sqlite import SqliteBatchStore
from tests.gateway.doubles import ScriptedResponse
from tests.gateway.harness import PEPPER, Rig, a_rig, chat, in_time, settle

NOW = 1_000_000.0
OWNER = "me"


class Bench:
    """A store and a batch runtime. `now` is the time of the runtime's clock, in seconds since the epoch."""

    def __init__(self, rig: Rig, store: SqliteBatchStore) -> None:
        self.rig = rig
        self.store = store
        self.now = NOW
        components = replace(
            rig.components,
            authenticator=KeyIdAuthenticator(rig.storage, PEPPER),
            canonicaliser=BatchCanonicaliser(b"secret"),
        )
        self.runtime = BatchRuntime(components, store, rig.ledger_directory.parent, OWNER, clock=lambda: self.now)

    async def add(self, bodies: list[bytes], **fields: Any) -> Batch:
        """Add a batch in status validating, with a line for each body: c-1, c-2, ..."""
        lines = [
            {"custom_id": f"c-{number}", "method": "POST", "url": "/v1/chat/completions", "body": json.loads(body)}
            for number, body in enumerate(bodies, 1)
        ]
        content = b"".join(json.dumps(line).encode() + b"\n" for line in lines)
        file = File(
            id=new_id("file-"), tenant="t", filename="f", purpose="batch", bytes=len(content), created_at=0,
            expires_at=int(NOW + 9999),
        )  # fmt: skip
        for start in range(0, len(content), CHUNK_BYTES):
            await self.store.append(file.id, content[start : start + CHUNK_BYTES])
        await self.store.add_file(file, max_stored_bytes=10**9)
        given: dict[str, Any] = {"tenant": "t", "created_at": int(NOW), "expires_at": int(NOW + 3600)} | fields
        batch = Batch(
            id=new_id("batch_"), key_id="dev", endpoint="/v1/chat/completions", input_file_id=file.id,
            completion_window="1h", **given,
        )  # fmt: skip
        await self.store.add_batch(batch, max_open=99)
        return batch

    async def claim(self, batch: Batch) -> BatchRun:
        """Claim the batch for this runtime, and return a run of it."""
        claimed = await self.store.update(batch.id, lambda each: each.claimed(OWNER, self.now, 10.0))
        assert claimed is not None
        return BatchRun(self.runtime, claimed)

    async def lines(self, batch_id: str, which: str) -> dict[str, Any]:
        """Return the decoded lines of the `output` or `error` file, by their custom ids."""
        batch = await self.store.batch(batch_id)
        assert batch is not None
        file_id = getattr(batch, f"{which}_file_id")
        content = await self.store.read(file_id, 0, 200_000) if file_id else b""
        rows = [json.loads(row) for row in content.splitlines()]
        return {row["custom_id"]: row for row in rows}

    async def status(self, batch_id: str) -> BatchStatus:
        batch = await self.store.batch(batch_id)
        assert batch is not None
        return batch.status


@asynccontextmanager
async def a_bench(directory: Path, **changes: Any) -> AsyncIterator[Bench]:
    async with a_rig(directory, **changes) as rig:
        store = SqliteBatchStore(directory / "batches.db")
        await store.open()
        try:
            yield Bench(rig, store)
        finally:
            await store.close()


def ask(content: str, **fields: Any) -> bytes:
    """Return the body of a chat request with one user message."""
    return chat(messages=[{"role": "user", "content": content}], **fields)


async def run_to_end(bench: Bench, bodies: list[bytes], **fields: int) -> Batch:
    """Add a batch, run it until it ends, and return it."""
    batch = await bench.add(bodies, **fields)
    run = await bench.claim(batch)
    await in_time(run.run())
    return run.batch


async def reply_of(bench: Bench, number: int) -> ScriptedResponse:
    """Wait until request `number` has reached a deployment, and return its reply, which the test feeds."""
    for _ in range(1000):
        if len(bench.rig.replies) > number:
            await settle()
            return bench.rig.replies[number]
        await asyncio.sleep(0.001)
    raise AssertionError("no deployment received a request")
