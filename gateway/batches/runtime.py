"""What all batch runs of one gateway share: the components, the store, the clock and the concurrency bound."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

from gateway.batches.stores.base import BatchStore
from gateway.serve import Components


class LeaseLost(Exception):
    """Another gateway owns the batch now, or the batch was deleted. Raised by every write of a run."""


class BatchRuntime:
    """Shared by all batch runs of one gateway.

    `slots` bounds the lines in flight over all batches by the policy's `batches.concurrency`, as it is at the start: a
    reload does not change it. `owner` is the gateway's replica name, and `clock` returns seconds since the epoch.
    """

    def __init__(
        self,
        components: Components,
        store: BatchStore,
        ledger_dir: Path,
        owner: str,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.components = components
        self.store = store
        self.ledger_dir = ledger_dir
        self.owner = owner
        self.clock = clock
        self.concurrency = components.policies.current.batches.concurrency
        self.slots = asyncio.Semaphore(self.concurrency)
