from __future__ import annotations

from gateway.errors import GatewayError, LimitReached
from gateway.limits.base import Estimate, charge_key
from gateway.limits.headers import go_duration, ratelimit_headers
from gateway.storage.base import Charge, RateCharge, Refused
from gateway.types import Call, Usage


class Requests:
    """Calls per time. One that is refused does not count; one that was admitted does, whatever becomes of it."""

    def charge(self, call: Call, estimate: Estimate) -> RateCharge | None:
        rate = call.principal.tenant.limits.requests
        return None if rate is None else RateCharge(charge_key(call, "requests"), 1, rate.amount, rate.period)

    def actual(self, usage: Usage, cost_nanos: int) -> int:
        return 1

    def refuse(self, call: Call, charge: Charge, refused: Refused) -> GatewayError:
        assert isinstance(charge, RateCharge) and refused.retry_after_seconds is not None  # one is never too many
        return LimitReached(
            f"rate limit reached: tenant {call.principal.tenant.name} may make {charge.limit} requests per "
            f"{go_duration(charge.period_seconds)}; try again in {go_duration(refused.retry_after_seconds)}",
            retry_after_seconds=refused.retry_after_seconds,
            headers=self.headers(charge, refused.remaining),
        )

    def headers(self, charge: Charge, remaining: int) -> dict[str, str]:
        assert isinstance(charge, RateCharge)
        return ratelimit_headers("requests", charge, remaining)
