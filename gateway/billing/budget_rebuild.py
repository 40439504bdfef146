"""Rebuilds the budgets in a storage whose data were lost, from the ledger.

A storage has a random id (`gateway.storage.base.RecordChanges`), which this gateway keeps in a file. If the storage has
another id, its data were lost, and all budgets are full again. Then the first worker of each gateway sums the receipts
of its own ledger, by the budgets of the present periods, and charges the sums: one atomic operation for all budgets of
one outermost tenant, which also notes that this gateway has done so. So a rebuild that was interrupted is repeated
without counting anything twice. Each gateway charges what its own ledger has, so the sums of all are complete.

Calls continue meanwhile. The cost of calls that ended within `gateway.limits.slices.REPORT_SECONDS` of the loss may be
counted twice, and never too little. Rates and slots are not rebuilt: they are as if nothing had been used.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from gateway.auth.authenticator import Authenticator
from gateway.auth.records import RecordFeed
from gateway.billing.ledger import OpenCall
from gateway.billing.recovery import call_of_row
from gateway.core.errors import StorageUnavailable
from gateway.core.ids import new_event_id
from gateway.limits.limiter import Limiter
from gateway.limits.scope import tenant_prefix
from gateway.policy.file import PolicyHolder
from gateway.storage.base import SpendCharge
from gateway.types import Call, Operation

if TYPE_CHECKING:
    from gateway.billing.ledger.spending import SpentLine

CHECK_SECONDS = 1.0
LINES_PER_TURN = 100  # of the sums, between which other tasks run

log = logging.getLogger(__name__)


class BudgetRebuild:
    """Compares the storage's id with that in `file`. Start `run` as a task in one worker of a gateway."""

    def __init__(
        self,
        feed: RecordFeed,
        limiter: Limiter,
        authenticator: Authenticator,
        policies: PolicyHolder,
        ledger: Path,
        file: Path,
        *,
        machine: str,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._feed = feed
        self._limiter = limiter
        self._authenticator = authenticator
        self._policies = policies
        self._ledger = ledger
        self._file = file
        self._owner = f"{machine}/rebuilt"  # no gateway has this name, since a slash cannot be part of one
        self._clock = clock
        self.rebuilt = 0  # budgets since the start

    async def run(self) -> None:
        """Rebuild the budgets whenever the storage has lost its data, forever."""
        while True:
            await self.check()
            await asyncio.sleep(CHECK_SECONDS)

    async def check(self) -> None:
        """Rebuild the budgets if the storage has another id than before. Repeats what fails at the next call."""
        if not self._feed.has_read:
            return
        before = self._file.read_text().strip() if self._file.exists() else ""
        if before == self._feed.store_id:
            return
        if before:
            log.warning("the storage has lost its data; its budgets are rebuilt from the ledger")
            try:
                await self._rebuild()
            except StorageUnavailable as error:
                log.warning("the budgets are not rebuilt yet, retrying: %s", error.message)
                return
            log.warning("%d budgets have been rebuilt since the start", self.rebuilt)
        self._file.parent.mkdir(parents=True, exist_ok=True)
        self._file.write_text(self._feed.store_id + "\n")

    async def _rebuild(self) -> None:
        slices = self._limiter.slices
        assert slices is not None, "only a shared storage can lose its data before the gateway does"
        for root, charges in (await self._spent(self._clock())).items():
            prefix = tenant_prefix(root)
            if await slices.settled_receipt(prefix, self._owner) is None:
                await slices.charge_receipts(prefix, self._owner, list(charges.values()), new_event_id())
                self.rebuilt += len(charges)

    async def _spent(self, now: float) -> dict[str, dict[str, SpendCharge]]:
        """Return the charges to the budgets of the present periods, by the outermost tenant and the budget's key."""
        spending = importlib.import_module("gateway.billing.ledger.spending")  # DuckDB is needed only now
        lines = await asyncio.to_thread(lambda: list(spending.spent(self._ledger)))
        found: dict[str, dict[str, SpendCharge]] = {}
        for number, line in enumerate(lines, start=1):
            if number % LINES_PER_TURN == 0:
                await asyncio.sleep(0)
            call = await self._call_of(line)
            present = {charge.key for charge in self._limiter.budget_charges(call, 0, admitted=now)}
            began = datetime.fromisoformat(f"{line.hour}:00").replace(tzinfo=UTC).timestamp()
            charges = found.setdefault(call.principal.tenant.root, {})
            for charge in self._limiter.budget_charges(call, line.nanos, admitted=began):
                if charge.key in present:
                    before = charges[charge.key].amount if charge.key in charges else 0
                    charges[charge.key] = msgspec.structs.replace(charge, amount=charge.amount + before)
        return {root: charges for root, charges in found.items() if charges}

    async def _call_of(self, line: SpentLine) -> Call:
        """Return a call to which the budgets apply that the calls of a line have spent."""
        policy = self._policies.current
        row = OpenCall(
            event_id="", call_id="", tenant=line.tenant, key_id=line.key_id, end_user=line.end_user,
            operation=Operation.CHAT, model_asked=line.model_asked, deployment="", latency_class=line.latency_class,
            service_tier=None, started="", prompt_tokens_estimate=0, policy_hash="", trace_id="0",
            model_routed=line.model_routed,
        )  # fmt: skip
        call = call_of_row(row, policy, self._authenticator.tenant(line.tenant, policy))
        owner = await self._authenticator.principal_of(line.key_id, policy)
        if owner is None or owner.tenant.name != line.tenant:
            return call
        return msgspec.structs.replace(call, principal=owner)
