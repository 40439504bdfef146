"""What all batches that a gateway works on share."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

from gateway.batches.store import Store
from gateway.serve import Components


class LeaseLost(Exception):
    """Another gateway works on the batch by now, or it is gone."""


class Workshop:
    """`concurrency` of the policy, as it is at the start, bounds lines in flight."""

    def __init__(
        self, components: Components, store: Store, ledger_dir: Path, owner: str, clock: Callable[[], float] = time.time
    ) -> None:
        self.components = components
        self.store = store
        self.ledger_dir = ledger_dir
        self.owner = owner
        self.clock = clock
        self.concurrency = components.policies.current.batches.concurrency
        self.slots = asyncio.Semaphore(self.concurrency)
