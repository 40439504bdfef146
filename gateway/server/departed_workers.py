"""The chains of workers that there are no more: what nobody else does for them is done once, and they are left."""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass

from gateway.auth.authenticator import Authenticator
from gateway.billing.ledger import Ledger
from gateway.billing.ledger.compactor import Compactor
from gateway.billing.ledger.retention import remove_old_segments
from gateway.billing.ledger.shipper import Shipper
from gateway.billing.recovery import Recovery
from gateway.core.errors import LedgerUnavailable
from gateway.deployments.fleet import Fleet
from gateway.limits.limiter import Limiter
from gateway.policy.file import PolicyHolder
from gateway.settings import Settings

DAY_SECONDS = 86_400

log = logging.getLogger("warmpath")


@dataclass(frozen=True, slots=True)
class DepartedWorkers:
    """By what the living gateway has, and as its settings have it done to its own chain."""

    settings: Settings
    fleet: Fleet
    policies: PolicyHolder
    limiter: Limiter
    authenticator: Authenticator

    async def finish(self, name: str) -> None:
        """Close a chain's calls, ship its rows, let it age, compact it. What fails is tried at the next start."""
        settings = self.settings
        try:
            async with Ledger(settings.ledger_dir, name) as ledger:
                recovery = Recovery(ledger, self.fleet, self.policies, self.limiter, self.authenticator)
                recovery.take_over()
                await recovery.catch_up()
                await ledger.durable(flush_now=True)
                if settings.ledger_ship is not None:
                    await Shipper(settings.ledger_ship, ledger, name).run(for_ever=False)
                if settings.ledger_keep_days is not None:
                    oldest = time.time() - settings.ledger_keep_days * DAY_SECONDS
                    await asyncio.to_thread(remove_old_segments, ledger.folder, oldest, ledger.may_remove_segment)
                if settings.ledger_compact:
                    await Compactor(ledger).catch_up()
        except LedgerUnavailable:
            pass  # another gateway is writing it
        except OSError as error:
            log.warning("the ledger of %s stays as it is until the next start: %s", name, error)
