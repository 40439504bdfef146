"""Request limit: the number of requests per period (`rate_limit_exceeded`, with the time to wait).

Minimal path 4 of 7. Next: ../queueing/queue.py.
"""

from __future__ import annotations

from gateway.core.errors import GatewayError, LimitReached
from gateway.core.times import go_duration
from gateway.limits.base import CallEstimate, Limit
from gateway.limits.headers import ratelimit_headers
from gateway.limits.scope import Scope
from gateway.policy import Limits
from gateway.storage.base import RateCharge, Rejection
from gateway.types import Usage


class RequestLimit(Limit[RateCharge]):
    """Limits requests per period. An admitted request counts, whatever its outcome. A rejected one does not count."""

    kind = "requests"
    header_kind = "requests"

    @classmethod
    def from_policy(cls, limits: Limits, scope: Scope) -> RequestLimit | None:
        rate = limits.requests
        return None if rate is None else cls(scope, RateCharge(scope.key("requests"), 1, rate.amount, rate.period))

    def __init__(self, scope: Scope, request: RateCharge) -> None:
        super().__init__(scope)
        self._request = request

    def charge(self, estimate: CallEstimate) -> RateCharge:
        return self._request

    def actual(self, usage: Usage, cost_nanos: int) -> int:
        return 1

    def rejection(self, charge: RateCharge, rejected: Rejection) -> GatewayError:
        assert rejected.retry_after_seconds is not None  # else one request would exceed the limit, which is at least 1
        return LimitReached(
            f"rate limit reached: {self.scope} may make {charge.limit} requests per "
            f"{go_duration(charge.period_seconds)}; try again in {go_duration(rejected.retry_after_seconds)}",
            retry_after_seconds=rejected.retry_after_seconds,
            headers=ratelimit_headers("requests", charge, rejected.remaining),
        )
