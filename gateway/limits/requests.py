from __future__ import annotations

from functools import lru_cache

from gateway.errors import GatewayError, LimitReached
from gateway.limits.base import Estimate, charge_key
from gateway.limits.headers import go_duration, ratelimit_headers
from gateway.storage.base import Charge, RateCharge, Refused
from gateway.types import Call, Usage


class Requests:
    """Calls per time. One that is refused does not count; one that was admitted does, whatever becomes of it."""

    def charge(self, call: Call, estimate: Estimate) -> RateCharge | None:
        tenant = call.principal.tenant
        rate = tenant.limits.requests
        return None if rate is None else _one_of(tenant.name, rate.amount, rate.period)

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


@lru_cache(maxsize=10_000)  # the same for every call of a tenant
def _one_of(tenant: str, amount: int, period_seconds: float) -> RateCharge:
    return RateCharge(charge_key(tenant, "requests"), 1, amount, period_seconds)
