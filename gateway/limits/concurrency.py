"""Concurrency limit: the number of calls in flight at the same time."""

from __future__ import annotations

from gateway.core.errors import GatewayError, LimitReached
from gateway.limits.base import CallEstimate, Limit
from gateway.limits.scope import Scope
from gateway.policy import Limits
from gateway.storage.base import HELD_RETRY_SECONDS, Rejection, SlotCharge
from gateway.types import Usage


class ConcurrencyLimit(Limit[SlotCharge]):
    """Limits the calls in flight. Each slot is a lease, which expires if the gateway that uses it dies."""

    kind = "concurrency"

    @classmethod
    def from_policy(cls, limits: Limits, scope: Scope) -> ConcurrencyLimit | None:
        slots = limits.concurrency
        return None if slots is None else cls(scope, SlotCharge(scope.key("concurrency"), slots))

    def __init__(self, scope: Scope, slot: SlotCharge) -> None:
        super().__init__(scope)
        self._slot = slot

    def charge(self, estimate: CallEstimate) -> SlotCharge:
        return self._slot

    def actual(self, usage: Usage, cost_nanos: int) -> int:
        return 0

    def rejection(self, charge: SlotCharge, rejected: Rejection) -> GatewayError:
        return LimitReached(
            f"{self.scope} may have {charge.limit} calls in flight, and has {charge.limit} now",
            retry_after_seconds=rejected.retry_after_seconds or HELD_RETRY_SECONDS,
        )
