from __future__ import annotations

from gateway.core.errors import GatewayError, LimitReached
from gateway.limits.base import Estimate, Limit
from gateway.limits.scope import Scope
from gateway.policy import Limits
from gateway.storage.base import HELD_RETRY_SECONDS, Rejection, SlotCharge
from gateway.types import Usage


class Concurrency(Limit[SlotCharge]):
    """Calls in flight. Places are leases, so none stays taken when a gateway dies."""

    kind = "concurrency"

    @classmethod
    def of(cls, limits: Limits, scope: Scope) -> Concurrency | None:
        places = limits.concurrency
        return None if places is None else cls(scope, SlotCharge(scope.key("concurrency"), places))

    def __init__(self, scope: Scope, one: SlotCharge) -> None:
        super().__init__(scope)
        self._one = one

    def charge(self, estimate: Estimate) -> SlotCharge:
        return self._one

    def actual(self, usage: Usage, cost_nanos: int) -> int:
        return 0

    def refuse(self, charge: SlotCharge, refused: Rejection) -> GatewayError:
        return LimitReached(
            f"{self.scope} may have {charge.limit} calls in flight at once, and has",
            retry_after_seconds=refused.retry_after_seconds or HELD_RETRY_SECONDS,
        )
