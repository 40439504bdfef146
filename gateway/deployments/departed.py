"""States of discovered deployments that have left: they finish their calls, and may come back with their caches.

A pod that fails a readiness check for a moment leaves the fleet and returns. Its engine has kept its prefix cache, so
its state is kept, too, for `KEEP_SECONDS`. A state with calls in flight is kept until they end.
"""

from __future__ import annotations

import time
from collections import OrderedDict

from gateway.deployments.state import DeploymentState

KEEP_SECONDS = 600.0
KEPT_MAX = 256  # states without calls in flight; those that left first are dropped first

Key = tuple[str, str]  # the template's name, and the instance's identity


class DepartedDeployments:
    """The states by template and identity. Owned by the event loop."""

    def __init__(self) -> None:
        self._states: OrderedDict[Key, tuple[float, DeploymentState]] = OrderedDict()

    def keep(self, state: DeploymentState) -> None:
        """A deployment has left the fleet."""
        now = time.monotonic()
        self._states[state.entry, state.identity] = now, state
        idle = [key for key, (_, kept) in self._states.items() if not kept.slots_taken]
        surplus = len(idle) - KEPT_MAX
        for number, key in enumerate(idle):
            if number < surplus or now - self._states[key][0] > KEEP_SECONDS:
                del self._states[key]

    def take(self, key: Key) -> DeploymentState | None:
        """The state of a deployment that comes back, if it is still kept. Removes it here."""
        kept = self._states.pop(key, None)
        if kept is None or (time.monotonic() - kept[0] > KEEP_SECONDS and not kept[1].slots_taken):
            return None
        return kept[1]

    def find(self, name: str) -> DeploymentState | None:
        """The state of a deployment that is still kept, by its name. It stays here."""
        return next((state for _, state in self._states.values() if state.name == name), None)

    def draining(self) -> dict[str, int]:
        """Calls in flight at deployments that have left, by the deployment's name."""
        return {state.name: state.slots_taken for _, state in self._states.values() if state.slots_taken}
