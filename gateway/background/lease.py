"""The lease of a run: proves to other gateways that the gateway which runs a response is alive, and counts runs.

A run holds two slots of the storage's reservations: one of the tenant's `max_open`, and the only one of its response.
If its gateway dies, the lease expires within `LEASE_SECONDS`, or when a gateway of the same name starts.
"""

from __future__ import annotations

import contextlib
import time
from urllib.parse import quote

from gateway.core.errors import LimitReached, StorageUnavailable
from gateway.storage.base import HELD_RETRY_SECONDS, Grant, SlotCharge, Storage

LEASE_SECONDS = 15.0
EXTEND_SECONDS = LEASE_SECONDS / 3


class RunLease:
    """The lease of one run. Methods raise `StorageUnavailable` unless they say otherwise."""

    def __init__(self, storage: Storage, tenant: str, response_id: str) -> None:
        self._storage = storage
        self._all = f"{quote(tenant, safe='')}/background"
        self._own = f"{self._all}/{response_id}"

    async def take(self, max_open: int) -> None:
        """Take the lease. Raises `LimitReached` if the tenant has `max_open` runs."""
        charges = (SlotCharge(self._all, max_open), SlotCharge(self._own, 1))
        verdict = await self._storage.reserve(self._own, charges, lease_seconds=LEASE_SECONDS, now=time.time())
        if not isinstance(verdict, Grant):
            raise LimitReached(
                f"{max_open} responses of this tenant are queued or in progress in the background; "
                "try again when one of them has ended",
                retry_after_seconds=HELD_RETRY_SECONDS,
            )

    async def extend(self) -> None:
        """Let the lease last for `LEASE_SECONDS` from now."""
        await self._storage.extend_lease(self._own, lease_seconds=LEASE_SECONDS, now=time.time())

    async def is_held(self) -> bool:
        """Whether any gateway holds the lease."""
        (free,) = await self._storage.remaining([SlotCharge(self._own, 1)], now=time.time())
        return free == 0

    async def release(self) -> None:
        """Release the lease. Raises nothing: if the storage is unavailable, the lease expires."""
        with contextlib.suppress(StorageUnavailable):
            await self._storage.settle(self._own, [0, 0], now=time.time())
