"""State that all batch runs of one gateway share: the components, the store, the clock and the concurrency limit."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from gateway.batches.fair_slots import FairSlots
from gateway.batches.stores.base import BatchStore
from gateway.serve import Components


class LeaseLost(Exception):
    """Another gateway now owns the batch, or the batch was deleted. Every write of a batch run may raise this."""


class BatchRuntime:
    """State that all batch runs of one gateway share.

    `slots` limits the lines in flight over all batches, and gives tenants turns. The limit is the policy's
    `batches.concurrency` at the gateway's start. A policy reload does not change the limit. `owner` is the gateway's
    replica name. `clock` returns seconds since the epoch.
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
        self.slots = FairSlots(self.concurrency)
