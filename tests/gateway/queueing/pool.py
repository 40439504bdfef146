"""A scheduler with a few slots, and queued calls with only the fields that it reads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from gateway.core.errors import GatewayError
from gateway.deployments.fleet import Fleet
from gateway.deployments.slot_permit import SlotPermit
from gateway.policy import LatencyClass, Model, Policy
from gateway.providers.offline import OfflineProvider
from gateway.queueing.scheduler import QueueScheduler
from tests.gateway.calls import a_policy


@dataclass(frozen=True)
class QueuedCall:
    """A call with only the fields that the queue reads."""

    tenant_name: str
    class_name: str
    latency_class: LatencyClass
    model: Model
    tokens_estimate: int
    fingerprint: Sequence[int] = ()
    prompt_tokens_estimate: int = 0
    session: str | None = None

    @property
    def may_be_held(self) -> bool:
        return self.latency_class.is_background

    @property
    def tenant_path(self) -> tuple[str, ...]:
        return tuple(self.tenant_name.split("/"))


@dataclass(eq=False)
class FakeWaiter:
    call: QueuedCall
    due: float
    permit: SlotPermit | None = None
    error: GatewayError | None = None
    done: bool = False
    on_grant: Callable[[FakeWaiter], None] = lambda waiter: None

    def grant(self, permit: SlotPermit) -> None:
        self.permit = permit
        self.on_grant(self)

    def reject(self, error: GatewayError) -> None:
        self.error = error


@dataclass
class Pool:
    """A scheduler for deployment `a` of model `m`, with a few slots, and `b` of `n`, with one. All slots are taken."""

    slots: int = 1
    waiting_max: int = 10_000
    classes: dict[str, dict[str, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.policy: Policy = a_policy(
            deployments=[
                {"name": "a", "base_url": "http://a.invalid/v1", "model": "s", "max_concurrency": self.slots},
                {"name": "b", "base_url": "http://b.invalid/v1", "model": "s", "max_concurrency": 1},
            ],
            models=[{"name": "m", "deployments": ["a"]}, {"name": "n", "deployments": ["b"]}],
            classes=self.classes,
        )
        self.fleet = Fleet(lambda deployment: OfflineProvider())
        self.fleet.apply(self.policy)
        self.scheduler: QueueScheduler[FakeWaiter] = QueueScheduler(self.fleet, waiting_max=self.waiting_max)
        self.taken = [permit for model in self.policy.models for permit in self.take(model)]
        self.granted: list[FakeWaiter] = []

    def take(self, model: Model) -> list[SlotPermit]:
        slots = []
        while (permit := self.fleet.take(self.fleet.deployments_of(model), 0.0, background=True)) is not None:
            slots.append(permit)
        return slots

    def call(
        self,
        tenant: str = "t",
        class_name: str = "realtime",
        tokens: int = 100,
        chain: Sequence[int] = (),
        model: int = 0,
    ) -> QueuedCall:
        limits = self.policy.classes[class_name]
        return QueuedCall(tenant, class_name, limits, self.policy.models[model], tokens, chain, tokens)

    def join(self, call: QueuedCall, now: float = 0.0, due: float | None = None) -> FakeWaiter:
        waiter = FakeWaiter(call, now + call.latency_class.max_wait if due is None else due)
        waiter.on_grant = self.granted.append
        self.scheduler.add(waiter, now)
        return waiter

    def next(self, now: float = 0.0) -> FakeWaiter | None:
        """Release a slot of model `m` and return the waiter that gets it. Its call ends at the next `next`."""
        before = len(self.granted)
        self.taken[0].release()
        self.scheduler.grant_free_slots(now)
        if len(self.granted) > before:
            permit = self.granted[-1].permit
            assert permit is not None
            self.taken[0] = permit
            return self.granted[-1]
        self.taken[0] = self.take(self.policy.models[0])[0]
        return None

    def drain(self) -> list[FakeWaiter]:
        drained = []
        while (waiter := self.next()) is not None:
            drained.append(waiter)
        return drained
