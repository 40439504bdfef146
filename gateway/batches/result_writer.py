"""Writes the results of one batch's lines to the store, and their receipts from there to the ledger.

Each answer is billed once, even if a gateway is killed at any moment:

* A line's result, its receipt and the batch's new counts are written to the store in one step, and only by the owner of
  the lease. A line without a result is called a second time. The lost first call has not been billed.
* The receipt is written to the ledger after that step. If the owner is killed before, the next owner of the batch finds
  the receipt in the store, and writes it unless its event id is in the ledger on this machine. If the last owner's
  ledger is on another machine, a receipt may be written twice, with the same event id.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

import msgspec

from gateway.batches.receipts import events_in_ledger
from gateway.batches.records import Batch, LineResult, TokenTotals
from gateway.batches.runtime import BatchRuntime, LeaseLost
from gateway.batches.stores.base import Change
from gateway.core.errors import LedgerUnavailable
from gateway.types import Receipt

LEDGER_RETRY_SECONDS = 1.0

Update = Callable[[Change, Sequence[LineResult], Sequence[int]], Awaitable[None]]
"""`BatchStore.update` of the batch: the change, new results, and lines whose receipts are in the ledger.

Raises `LeaseLost`.
"""

_receipt = msgspec.json.Decoder(Receipt).decode


class ResultWriter:
    """Writes the results of one batch. Lines that finish while a write is in flight share the next write."""

    def __init__(self, runtime: BatchRuntime, batch_id: str, update: Update) -> None:
        self._runtime = runtime
        self._batch_id = batch_id
        self._update = update
        self._unwritten: list[LineResult] = []
        self._writer: asyncio.Task[None] | None = None
        self._unrecorded: dict[int, Receipt] = {}  # receipts in the store but not in the ledger, by line
        self._recorded: list[int] = []  # lines whose receipts are in the ledger, but are not yet marked so in the store

    @property
    def unwritten(self) -> int:
        """Number of results that are not in the store yet."""
        return len(self._unwritten)

    def add(self, result: LineResult) -> None:
        """Add a result, which the next `flush` writes."""
        self._unwritten.append(result)

    async def flush(self) -> None:
        """Wait until the results added so far are in the store. Raises `LeaseLost` or `StorageUnavailable`.

        Then tries to write their receipts to the ledger, and does not wait if the ledger is unavailable.
        """
        if self._writer is None:
            self._writer = asyncio.create_task(self._write(), name=f"results of {self._batch_id}")
        # Shielded, since other lines wait for the same write.
        await asyncio.shield(self._writer)

    async def flush_all(self) -> None:
        """Wait until all results are written, including results that are added meanwhile."""
        while self._unwritten or self._writer is not None:
            await self.flush()

    async def record_all_receipts(self) -> None:
        """Wait until every receipt is in the ledger, however long the ledger is unavailable.

        Must be awaited before the batch ends, because its end deletes the receipts from the store.
        """
        while self._unrecorded:
            await asyncio.sleep(LEDGER_RETRY_SECONDS)
            self._record_receipts()

    async def recover(self, *, since: float) -> None:
        """Write the receipts that the batch's last owner did not write because it was killed.

        `since` is the batch's creation time in seconds since the epoch, which bounds the search in the ledger.
        """
        encoded = await self._runtime.store.unrecorded_receipts(self._batch_id)
        receipts = {line: _receipt(content) for line, content in encoded.items()}
        events = [receipt.event_id for receipt in receipts.values()]
        known = await events_in_ledger(self._runtime.ledger_dir, events, since=since)
        self._recorded = [line for line, receipt in receipts.items() if receipt.event_id in known]
        self._unrecorded = {line: receipt for line, receipt in receipts.items() if receipt.event_id not in known}
        self._record_receipts()

    async def _write(self) -> None:
        try:
            while self._unwritten:
                results, self._unwritten = self._unwritten, []
                recorded, self._recorded = self._recorded, []
                receipts = {each.line: _receipt(each.receipt) for each in results if each.receipt}
                try:
                    await self._update(partial(self._with_results, results), results, recorded)
                except LeaseLost:  # the new owner calls these lines again, and bills its own calls
                    for receipt in receipts.values():
                        self._runtime.components.call_log.abandon(receipt.call_id)
                    raise
                self._unrecorded |= receipts
                self._record_receipts()
        finally:
            self._writer = None

    def _with_results(self, results: Sequence[LineResult], batch: Batch) -> Batch | None:
        if batch.owner != self._runtime.owner:
            return None
        completed = sum(each.ok for each in results)
        return msgspec.structs.replace(
            batch,
            completed=batch.completed + completed,
            failed=batch.failed + len(results) - completed,
            tokens=sum((each.tokens for each in results), batch.tokens),
        )

    def _record_receipts(self) -> None:
        """Write receipts to the ledger until it is unavailable."""
        for line, receipt in list(self._unrecorded.items()):
            try:
                self._runtime.components.call_log.append(receipt)
            except LedgerUnavailable:
                return
            del self._unrecorded[line]
            self._recorded.append(line)


def result_of(number: int, ok: bool, content: bytes, receipt: Receipt | None) -> LineResult:
    """Return the result of a line. `content` is its output or error line; without a receipt, nothing was used."""
    if receipt is None:
        return LineResult(number, ok, content)
    used = receipt.input_uncached + receipt.cache_read + receipt.cache_write
    tokens = TokenTotals(used, receipt.cache_read, receipt.output, receipt.reasoning)
    return LineResult(number, ok, content, msgspec.json.encode(receipt), tokens)
