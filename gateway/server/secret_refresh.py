"""Background task that reads deployments' secrets again: changed files, and commands whose output has expired.

A deployment whose secret has changed gets a new provider. Requests in flight keep the old one.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from gateway.deployments.fleet import Fleet
from gateway.policy import Deployment, Secret
from gateway.providers import Provider
from gateway.settings import SettingsError, secrets_of

REFRESH_SECONDS = 2.0  # as often as the policy file is looked at

log = logging.getLogger("warmpath")


class SecretRefresh:
    """Keeps the providers' secrets up to date. While a secret cannot be read, its last value is used."""

    def __init__(
        self, fleet: Fleet, resolve_secret: Callable[[Secret], str], make_provider: Callable[[Deployment], Provider]
    ) -> None:
        self._fleet = fleet
        self._resolve_secret = resolve_secret
        self._make_provider = make_provider
        self._values: dict[str, tuple[Deployment, list[str]]] = {}  # by deployment: what its provider was made with
        self._unreadable: set[str] = set()  # deployments whose failure has been logged

    async def run(self) -> None:
        """Look once per `REFRESH_SECONDS`, until cancelled."""
        while True:
            await self.refresh()
            await asyncio.sleep(REFRESH_SECONDS)

    async def refresh(self) -> None:
        """Read all secrets that may change, and replace the providers of those that did."""
        changing = {
            deployment.name: deployment
            for deployment in self._fleet
            if any(secret.env is None for _, secret in secrets_of(deployment.config))
        }
        self._values = {name: value for name, value in self._values.items() if name in changing}
        for name, deployment in changing.items():
            config = deployment.config
            try:
                # In a thread, because a command takes time and a file may be on a network.
                values = await asyncio.to_thread(self._read, config)
                known = self._values.get(name)
                if known is not None and known[0] == config and known[1] != values:
                    deployment.configure(config, self._make_provider(config))
                    log.info("%s: a secret has changed and is used from now on", name)
            except SettingsError as error:
                if name not in self._unreadable:
                    log.error("%s: %s; its last value is used", name, error)
                self._unreadable.add(name)
                continue
            self._unreadable.discard(name)
            self._values[name] = config, values

    def _read(self, config: Deployment) -> list[str]:
        return [self._resolve_secret(secret) for _, secret in secrets_of(config)]
