"""The deployments of the current policy: `Fleet` finds those of a model and gives out their slots.

The queue takes slots here (`SlotPermit`), and the router ranks deployments by their state (`DeploymentState`). The
policy says which deployments exist; `Fleet.apply` takes over a new one. `Fleet.set_instances` takes over what discovery
found for a template. State survives for each deployment whose address, or instance, and model stay the same. Everything
here is owned by the event loop and needs no locks.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence

from gateway.deployments.departed import DepartedDeployments
from gateway.deployments.evidence import Quarantine
from gateway.deployments.instances import Instance, UnusableInstance, deployment_of
from gateway.deployments.sent_call import SentCall
from gateway.deployments.slot_permit import SlotPermit
from gateway.deployments.state import DeploymentState
from gateway.policy import Deployment, Model, Policy
from gateway.policy.roles import PREFILL
from gateway.prefix.decode_speed import DecodeSpeed
from gateway.prefix.estimate import Estimate
from gateway.prefix.fleet_traffic import FleetTraffic
from gateway.prefix.learned_capacity import CapacityGroup
from gateway.prefix.prefill_speed import SpeedGroup
from gateway.prefix.working_set import WorkingSet
from gateway.providers.base import Provider

log = logging.getLogger("warmpath")


class Fleet:
    """All deployments of the current policy. Calls `on_slot_free` whenever a slot may have become free."""

    def __init__(
        self,
        make_provider: Callable[[Deployment], Provider],
        share_of: Callable[[int], int] = lambda slots: slots,
        outbox: deque[SentCall] | None = None,
    ) -> None:
        """`share_of` maps a deployment's slots to this process's share of them, if several workers divide them.

        `outbox` receives finished calls, if there are peer gateways to inform.
        """
        self._make_provider = make_provider
        self._share_of = share_of
        self._outbox = outbox
        self._policy: Policy | None = None
        self._instances: dict[str, tuple[Instance, ...]] = {}  # by template
        self._deployments: dict[str, DeploymentState] = {}
        self._by_entry: dict[str, list[DeploymentState]] = {}  # by name in the policy: one, or a template's
        self.departed = DepartedDeployments()
        # By a model's deployment names; filled on use
        self._by_names: dict[tuple[str, ...], list[DeploymentState]] = {}
        self.working_set = WorkingSet()
        self.quarantine = Quarantine()
        self.on_slot_free: Callable[[], None] = lambda: None
        # Bounded by the calls in flight
        self._pending_moves: dict[SlotPermit, tuple[Sequence[DeploymentState], asyncio.Future[None]]] = {}

    def apply(self, policy: Policy) -> None:
        """Take over a new policy. Calls in flight keep the deployments that they began with."""
        self._policy = policy
        self._rebuild()

    def set_instances(self, template: str, instances: Sequence[Instance]) -> None:
        """Replace the servers of a template by those that its source names now.

        Calls in flight on a removed instance end there. Instances for which the template has no value are logged and
        omitted.
        """
        self._instances[template] = tuple(instances)
        self._rebuild()

    def _rebuild(self) -> None:
        entries = () if self._policy is None else self._policy.deployments
        templates = {entry.name for entry in entries if entry.source is not None}
        self._instances = {name: found for name, found in self._instances.items() if name in templates}
        before, self._by_entry = self._deployments, {}
        present: dict[str, DeploymentState] = {}
        for entry in entries:
            states = self._by_entry[entry.name] = []
            for deployment, identity in self._members(entry):
                if deployment.name not in present:  # if two servers have one name, the first is used
                    states.append(self._state_for(deployment, entry, identity))
                    present[deployment.name] = states[-1]
        self._deployments = present
        for state in before.values():
            if state.entry in templates and present.get(state.name) is not state:
                self.departed.keep(state)
        self._share_measurements(() if self._policy is None else self._policy.models)
        self._by_names.clear()
        self.on_slot_free()

    def _members(self, entry: Deployment) -> Iterator[tuple[Deployment, str | None]]:
        """The deployments of a policy's entry, each with its identity if it was discovered."""
        if entry.source is None:
            yield entry, None
            return
        for instance in self._instances.get(entry.name, ()):
            try:
                yield deployment_of(entry, instance), instance.identity
            except UnusableInstance as problem:
                log.warning("deployment %s: %s", entry.name, problem)

    def _share_measurements(self, models: Sequence[Model]) -> None:
        """Let deployments that the policy describes as equal learn from each other, and those of a model of its users.

        What removed deployments measured is forgotten.
        """
        groups: dict[tuple[str, str, int], tuple[SpeedGroup, DecodeSpeed]] = {}
        capacities: dict[tuple[str, str, int], CapacityGroup] = {}
        for deployment in self._deployments.values():
            config, estimate = deployment.config, deployment.estimate
            key = config.provider, config.model, config.prefill_tokens_per_second
            speeds, decode = groups.setdefault(key, (SpeedGroup(), estimate.decode))
            speeds.add(estimate.speed)
            estimate.decode = decode
            key = config.provider, config.model, config.cache_tokens
            deployment.cache.share_capacity(capacities.setdefault(key, CapacityGroup()))
        shared: set[FleetTraffic] = set()
        for estimates in self._alternatives(models):
            # A policy that separates deployments leaves the common traffic to the first group.
            traffic = estimates[0].traffic if estimates[0].traffic not in shared else FleetTraffic()
            shared.add(traffic)
            traffic.queued.clear()  # of models that the policy may not have any more
            for estimate in estimates:
                estimate.traffic = traffic

    def _alternatives(self, models: Sequence[Model]) -> Iterator[list[Estimate]]:
        """The estimates of deployments that calls choose from, in groups. No group is empty.

        Prefill deployments are no alternative to those that answer: a call may be sent to one of each.
        """
        for names in _joined_by_models(models):
            states = [state for name in names for state in self._by_entry.get(name, ())]
            for prefills in (False, True):
                if estimates := [state.estimate for state in states if (state.role == PREFILL) is prefills]:
                    yield estimates

    def _state_for(self, deployment: Deployment, entry: Deployment, identity: str | None) -> DeploymentState:
        slots = self._share_of(deployment.max_concurrency)
        if slots != deployment.max_concurrency:
            deployment = deployment.model_copy(update={"max_concurrency": slots})
        known = self._deployments.get(deployment.name)
        if known is None or not _is_same(known, deployment, entry.name, identity):
            known = None if identity is None else self.departed.take((entry.name, identity))
        if known is None or not _is_same(known, deployment, entry.name, identity):
            return DeploymentState(
                deployment, self._make_provider(deployment), self.working_set, self._outbox,
                entry=entry.name, identity=identity,
            )  # fmt: skip
        if known.config != deployment:
            known.configure(deployment, self._make_provider(deployment))
        return known

    def note_queued(self, model: Model, calls: int) -> None:
        """Note how many calls for the model wait in the queue. Routing counts them as delayed."""
        for deployment in self.deployments_of(model)[:1]:  # all have the same traffic
            queued = deployment.estimate.traffic.queued
            queued[model.name] = calls
            if not calls:
                del queued[model.name]

    def with_slots_for(self, model: Model) -> Sequence[DeploymentState]:
        """The deployments whose slots a call for the model may wait for: the model's, or, without any, a fallback's."""
        deployments = self.deployments_of(model)
        if deployments or self._policy is None:
            return deployments
        known = self._policy.models_by_name
        fallbacks = (self.deployments_of(known[name]) for name in model.fallbacks if name in known)
        return next((found for found in fallbacks if found), ())

    def awaits_instances(self, model: Model) -> bool:
        """Whether discovery may find a deployment of the model, so that it is worth waiting for one."""
        found = {} if self._policy is None else self._policy.deployments_by_name
        return any(name in found and found[name].source is not None for name in model.deployments)

    def find(self, name: str) -> DeploymentState | None:
        """The deployment of this name, also if discovery has removed it and its state is still kept."""
        return self._deployments.get(name) or self.departed.find(name)

    def template_of(self, name: str) -> Deployment | None:
        """The template of a name that only a discovered deployment can have."""
        entry = None if self._policy is None else self._policy.deployment(name)
        return entry if entry is not None and entry.source is not None and entry.name != name else None

    def __iter__(self) -> Iterator[DeploymentState]:
        return iter(self._deployments.values())

    def named(self, entry: str) -> Sequence[DeploymentState]:
        """The deployments of a name in the policy: one, or those that discovery has found for a template."""
        return self._by_entry.get(entry, ())

    def deployments_of(self, model: Model) -> Sequence[DeploymentState]:
        """The deployments of a model that answer calls: all but those with the role prefill.

        Empty if a reload removed those that an older call names, or if discovery has found none.
        """
        deployments = self._by_names.get(model.deployments)
        if deployments is None:
            deployments = [state for state in self._members_of(model) if state.role != PREFILL]
            self._by_names[model.deployments] = deployments
        return deployments

    def prefill_deployments_of(self, model: Model) -> Sequence[DeploymentState]:
        """The deployments of a model with the role prefill, which compute prompts for those with the role decode."""
        return [state for state in self._members_of(model) if state.role == PREFILL]

    def _members_of(self, model: Model) -> Iterator[DeploymentState]:
        return (state for name in model.deployments for state in self._by_entry.get(name, ()))

    def take(
        self, deployments: Sequence[DeploymentState], now: float, *, background: bool = False
    ) -> SlotPermit | None:
        """A slot at the least busy of these deployments, or None if all are full."""
        least_busy, least_share = None, math.inf
        for deployment in deployments:
            if deployment.breaker.open:  # then only deployments that admit a request may be chosen
                least_busy = _least_busy_admitting(deployments, now)
                break
            if deployment.has_slot and (load := deployment.slots_taken / deployment.slots) < least_share:
                least_busy, least_share = deployment, load
        if least_busy is None:
            return None
        permit = SlotPermit(self, least_busy, background=background)
        if not background:
            least_busy.background.note_urgent(least_busy.slots_taken - least_busy.background.taken, now)
        return permit

    def give_back(self, deployment: DeploymentState, *, background: bool = False) -> None:
        """Free a slot. A call that waits in `move_when_slot_free` gets it before queued calls do."""
        deployment.slots_taken -= 1
        deployment.background.taken -= background
        assert deployment.slots_taken >= 0
        # Calls whose deployment failed had a slot before, so they come before the queue.
        if self._pending_moves:
            self._move_one_to(deployment)
        self.on_slot_free()

    async def move_when_slot_free(
        self, permit: SlotPermit, deployments: Sequence[DeploymentState], seconds: float
    ) -> None:
        """Wait until one of the deployments has a free slot, and move the permit there; at most for `seconds`.

        Calls that wait here had a slot before and their deployment failed. They come before the calls in the queue.
        """
        moved = asyncio.get_running_loop().create_future()
        self._pending_moves[permit] = (deployments, moved)
        try:
            await asyncio.wait([moved], timeout=seconds)
        finally:
            self._pending_moves.pop(permit, None)

    def _move_one_to(self, deployment: DeploymentState) -> None:
        for permit, (deployments, moved) in self._pending_moves.items():
            if deployment in deployments and deployment.has_slot:
                del self._pending_moves[permit]
                permit.move_to(deployment)
                moved.set_result(None)
                return


def _joined_by_models(models: Sequence[Model]) -> Iterator[dict[str, None]]:
    """The names of deployments in groups: two that serve one model are in one group, whatever else they serve."""
    group_of: dict[str, dict[str, None]] = {}
    for model in models:
        joined: dict[str, None] = {}
        for name in model.deployments:
            if name not in joined:
                joined |= group_of.get(name) or {name: None}
        group_of |= dict.fromkeys(joined, joined)
    while group_of:
        group = next(iter(group_of.values()))
        yield group
        for name in group:
            del group_of[name]


def _is_same(known: DeploymentState, deployment: Deployment, entry: str, identity: str | None) -> bool:
    """Whether what was learned about a deployment still applies."""
    before = known.config
    return (
        known.entry == entry
        and known.identity == (identity or deployment.base_url)
        and (before.model, before.slots) == (deployment.model, deployment.slots)
    )


def _least_busy_admitting(deployments: Sequence[DeploymentState], now: float) -> DeploymentState | None:
    """The least busy deployment whose breaker admits a request. Used if some breaker is open.

    It returns None if all of those are full: waiting for a deployment that works is better than a slot at one that does
    not. If no breaker admits a request, any free deployment will do: the router then refuses the call.
    """
    admitting = [deployment for deployment in deployments if deployment.breaker.would_admit(now)]
    free = [deployment for deployment in admitting or deployments if deployment.has_slot]
    return min(free, key=lambda s: s.slots_taken / s.slots, default=None)
