"""The results of one batch's lines: they go into the store, and their receipts from there into the ledger.

* A line's result, its share of the counts and its receipt are written in one step, and only by the lease's owner. A
  line without a result is called again; nobody has been billed for the call that was lost.
* A receipt goes into the ledger after that step. One that may not have come so far is found in the store by whoever
  takes over, and is written then, unless the ledger on this machine has its event id.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

import msgspec

from gateway.batches.receipts import events_in_ledger
from gateway.batches.records import Batch, Result, Tokens
from gateway.batches.store import Change
from gateway.batches.workshop import LeaseLost, Workshop
from gateway.core.errors import LedgerUnavailable
from gateway.types import Receipt

LEDGER_RETRY_SECONDS = 1.0

Update = Callable[[Change, Sequence[Result], Sequence[int]], Awaitable[None]]
"""As `Store.update` of the batch: the change, results, and lines whose receipts are paid. Raises `LeaseLost`."""

_receipt = msgspec.json.Decoder(Receipt).decode


class Results:
    """Lines that are done at the same time share the steps."""

    def __init__(self, shop: Workshop, batch_id: str, update: Update) -> None:
        self._shop = shop
        self._batch_id = batch_id
        self._update = update
        self._unwritten: list[Result] = []
        self._writer: asyncio.Task[None] | None = None
        self._owed: dict[int, Receipt] = {}  # written with their results, and not yet in the ledger
        self._paid: list[int] = []  # in the ledger, and the store is still to be told

    @property
    def unwritten(self) -> int:
        """How many are not in the store yet."""
        return len(self._unwritten)

    def add(self, result: Result) -> None:
        """To be `written`."""
        self._unwritten.append(result)

    async def written(self) -> None:
        """What was added is in the store, and its receipts are in the ledger, unless that can not be written."""
        if self._writer is None:
            self._writer = asyncio.create_task(self._write(), name=f"results of {self._batch_id}")
        await asyncio.shield(self._writer)

    async def all_written(self) -> None:
        while self._unwritten or self._writer is not None:
            await self.written()

    async def all_paid(self) -> None:
        """Every receipt is in the ledger, however long that can not be written: none is forgotten with the results."""
        while self._owed:
            await asyncio.sleep(LEDGER_RETRY_SECONDS)
            self._pay()

    async def take_over(self, *, since: float) -> None:
        """The last owner may have been killed between a result and its receipt's coming into the ledger. `since` the
        batch was made, in seconds since the epoch.
        """
        owed = {line: _receipt(content) for line, content in (await self._shop.store.owed(self._batch_id)).items()}
        events = [receipt.event_id for receipt in owed.values()]
        known = await events_in_ledger(self._shop.ledger_dir, events, since=since)
        self._paid = [line for line, receipt in owed.items() if receipt.event_id in known]
        self._owed = {line: receipt for line, receipt in owed.items() if receipt.event_id not in known}
        self._pay()

    async def _write(self) -> None:
        try:
            while self._unwritten:
                results, self._unwritten = self._unwritten, []
                paid, self._paid = self._paid, []
                receipts = {each.line: _receipt(each.receipt) for each in results if each.receipt}
                try:
                    await self._update(partial(self._with_results, results), results, paid)
                except LeaseLost:  # another gateway has called these lines again
                    for receipt in receipts.values():
                        self._shop.components.call_log.abandon(receipt.call_id)
                    raise
                self._owed |= receipts
                self._pay()
        finally:
            self._writer = None

    def _with_results(self, results: Sequence[Result], batch: Batch) -> Batch | None:
        if batch.owner != self._shop.owner:
            return None
        completed = sum(each.ok for each in results)
        return msgspec.structs.replace(
            batch,
            completed=batch.completed + completed,
            failed=batch.failed + len(results) - completed,
            tokens=sum((each.tokens for each in results), batch.tokens),
        )

    def _pay(self) -> None:
        """Write what is owed into the ledger, as far as that is possible now."""
        for line, receipt in list(self._owed.items()):
            try:
                self._shop.components.call_log.append(receipt)
            except LedgerUnavailable:
                return
            del self._owed[line]
            self._paid.append(line)


def result_of(number: int, ok: bool, content: bytes, receipt: Receipt | None) -> Result:
    """`content` is the line of the output or error file; without a receipt, nothing was used."""
    if receipt is None:
        return Result(number, ok, content)
    used = receipt.input_uncached + receipt.cache_read + receipt.cache_write
    tokens = Tokens(used, receipt.cache_read, receipt.output, receipt.reasoning)
    return Result(number, ok, content, msgspec.json.encode(receipt), tokens)
