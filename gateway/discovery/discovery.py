"""Runs a follower for each template of the policy, and starts and stops them as the policy changes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

from gateway.core.supervision import SupervisedTask, Supervisor
from gateway.deployments.fleet import Fleet
from gateway.discovery.follower import Follower
from gateway.policy import Deployment, Policy, Secret
from gateway.providers.base import Provider
from gateway.providers.transport import HTTPTransport

FIRST_LIST_SECONDS = 15.0  # how long the gateway is not ready because a source has not been read yet


class Discovery:
    """The followers of all templates. Owned by the event loop.

    A template whose source and settings are unchanged by a reload keeps its follower.
    """

    def __init__(
        self,
        fleet: Fleet,
        transport: HTTPTransport,
        resolve_secret: Callable[[Secret], str],
        make_provider: Callable[[Deployment], Provider],
        supervisor: Supervisor,
    ) -> None:
        self._fleet = fleet
        self._transport = transport
        self._resolve_secret = resolve_secret
        self._make_provider = make_provider
        self._supervisor = supervisor
        self._policy: Policy | None = None
        self._changed = asyncio.Event()
        self._running: dict[str, tuple[Follower, SupervisedTask]] = {}
        self._began_at: float | None = None

    def __iter__(self) -> Iterator[Follower]:
        return iter([follower for follower, _ in self._running.values()])

    def apply(self, policy: Policy) -> None:
        """Take over a new policy. Takes effect at once if `run` is running."""
        self._policy = policy
        self._changed.set()

    async def run(self) -> None:
        """Run the followers until cancelled, then stop them."""
        self._began_at = asyncio.get_running_loop().time()
        try:
            while True:
                self._changed.clear()
                await self._sync()
                await self._changed.wait()
        finally:
            for _, task in self._running.values():
                await task.cancel()
            self._running.clear()

    async def _sync(self) -> None:
        entries = () if self._policy is None else self._policy.deployments
        templates = {entry.name: entry for entry in entries if entry.source is not None}
        for name, (follower, task) in list(self._running.items()):
            if templates.get(name) != follower.template:
                del self._running[name]
                await task.cancel()
        for name, template in templates.items():
            if name not in self._running:
                follower = Follower(template, self._fleet, self._transport, self._resolve_secret, self._make_provider)
                self._running[name] = follower, self._supervisor.start(f"discovery of {name}", follower.run)

    def unread(self) -> list[str]:
        """The templates whose source has not been read, while the start is recent. The gateway is not ready yet."""
        if self._policy is None or self._began_at is None:
            return []
        if asyncio.get_running_loop().time() - self._began_at > FIRST_LIST_SECONDS:
            return []
        known = {name for name, (follower, _) in self._running.items() if follower.has_list}
        return [one.name for one in self._policy.deployments if one.source is not None and one.name not in known]

    def state(self) -> dict[str, dict[str, object]]:
        """The state of each template's source, for /ready."""
        return {name: follower.state() for name, (follower, _) in self._running.items()}
