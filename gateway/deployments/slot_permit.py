"""`SlotPermit`: one slot of a deployment's concurrency, held by one call."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gateway.deployments.fleet import Fleet
    from gateway.deployments.state import DeploymentState


class SlotPermit:
    """One slot of a deployment's concurrency, held by one call; a context manager. Releasing it twice is safe."""

    def __init__(self, fleet: Fleet, deployment: DeploymentState, *, background: bool = False) -> None:
        self._fleet = fleet
        self._background = background
        self._deployment: DeploymentState | None = deployment
        deployment.slots_taken += 1
        deployment.background.taken += background

    def __enter__(self) -> SlotPermit:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def move_to(self, deployment: DeploymentState) -> bool:
        """Exchange the slot for one at `deployment`. False, without a change, if none is free there."""
        if deployment is self._deployment:
            return True
        if self._deployment is None or not deployment.has_slot:
            return False
        previous, self._deployment = self._deployment, deployment
        deployment.slots_taken += 1
        deployment.background.taken += self._background
        self._fleet.give_back(previous, background=self._background)
        return True

    def is_at(self, deployment: DeploymentState) -> bool:
        """Whether the slot is one of this deployment's."""
        return self._deployment is deployment

    def swap(self, other: SlotPermit) -> None:
        """Exchange slots with another permit of the same call."""
        self._deployment, other._deployment = other._deployment, self._deployment

    def release(self) -> None:
        """Give the slot back."""
        if self._deployment is not None:
            previous, self._deployment = self._deployment, None
            self._fleet.give_back(previous, background=self._background)
