from __future__ import annotations

from gateway.core.errors import GatewayError, LimitReached
from gateway.core.times import go_duration
from gateway.limits.base import Estimate, Limit
from gateway.limits.headers import ratelimit_headers
from gateway.limits.scope import Scope
from gateway.policy import Limits
from gateway.storage.base import RateCharge, Rejection
from gateway.types import Usage


class Requests(Limit[RateCharge]):
    """Calls per time. One that is refused does not count; one that was admitted does, whatever becomes of it."""

    kind = "requests"
    header_kind = "requests"

    @classmethod
    def of(cls, limits: Limits, scope: Scope) -> Requests | None:
        rate = limits.requests
        return None if rate is None else cls(scope, RateCharge(scope.key("requests"), 1, rate.amount, rate.period))

    def __init__(self, scope: Scope, one: RateCharge) -> None:
        super().__init__(scope)
        self._one = one

    def charge(self, estimate: Estimate) -> RateCharge:
        return self._one

    def actual(self, usage: Usage, cost_nanos: int) -> int:
        return 1

    def refuse(self, charge: RateCharge, refused: Rejection) -> GatewayError:
        assert refused.retry_after_seconds is not None  # one is never too many
        return LimitReached(
            f"rate limit reached: {self.scope} may make {charge.limit} requests per "
            f"{go_duration(charge.period_seconds)}; try again in {go_duration(refused.retry_after_seconds)}",
            retry_after_seconds=refused.retry_after_seconds,
            headers=ratelimit_headers("requests", charge, refused.remaining),
        )
