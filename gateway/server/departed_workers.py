"""Finishes the ledger chains of workers that no longer exist, after the number of workers changed."""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass

from gateway.auth.authenticator import Authenticator
from gateway.billing.ledger import Ledger, make_shipper
from gateway.billing.ledger.compactor import Compactor
from gateway.billing.ledger.retention import remove_old_segments
from gateway.billing.recovery import CrashRecovery
from gateway.core.errors import LedgerUnavailable
from gateway.deployments.fleet import Fleet
from gateway.limits.limiter import Limiter
from gateway.policy.file import PolicyHolder
from gateway.settings import Settings

DAY_SECONDS = 86_400

log = logging.getLogger("warmpath")


@dataclass(frozen=True, slots=True)
class DepartedWorkers:
    """Ships, removes and compacts the ledger chains of departed workers, as the settings require for all chains."""

    settings: Settings
    fleet: Fleet
    policies: PolicyHolder
    limiter: Limiter
    authenticator: Authenticator

    async def finish(self, name: str) -> None:
        """Close the open calls of a chain, ship its rows, remove its old segments and compact the others.

        A failure is logged and retried at the next start.
        """
        settings = self.settings
        try:
            async with Ledger(settings.ledger_dir, name) as ledger:
                recovery = CrashRecovery(
                    ledger, self.fleet, self.policies, self.limiter, self.authenticator, owner=name
                )
                recovery.take_over()
                await recovery.catch_up()
                await ledger.durable(flush_now=True)
                if settings.ledger_ship is not None:
                    await make_shipper(settings.ledger_ship, ledger, name).run(forever=False)
                if settings.ledger_keep_days is not None:
                    oldest = time.time() - settings.ledger_keep_days * DAY_SECONDS
                    await asyncio.to_thread(remove_old_segments, ledger.folder, oldest, ledger.may_remove_segment)
                if settings.ledger_compact:
                    await Compactor(ledger).catch_up()
        except LedgerUnavailable:
            pass  # another process writes this chain
        except OSError as error:
            log.warning(
                "the ledger chain of departed worker %s could not be finished; the next start tries again: %s",
                name,
                error,
            )
