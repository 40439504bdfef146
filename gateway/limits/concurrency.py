from __future__ import annotations

from functools import lru_cache

from gateway.errors import GatewayError, LimitReached
from gateway.limits.base import Estimate, charge_key
from gateway.storage.base import HELD_RETRY_SECONDS, Charge, LeaseCharge, Refused
from gateway.types import Call, Usage


class Concurrency:
    """Calls in flight. Places are leases, so none stays taken when a gateway dies."""

    def charge(self, call: Call, estimate: Estimate) -> LeaseCharge | None:
        tenant = call.principal.tenant
        places = tenant.limits.concurrency
        return None if places is None else _one_of(tenant.name, places)

    def actual(self, usage: Usage, cost_nanos: int) -> int:
        return 0

    def refuse(self, call: Call, charge: Charge, refused: Refused) -> GatewayError:
        return LimitReached(
            f"tenant {call.principal.tenant.name} may have {charge.limit} calls in flight at once, and has",
            retry_after_seconds=refused.retry_after_seconds or HELD_RETRY_SECONDS,
        )

    def headers(self, charge: Charge, remaining: int) -> dict[str, str]:
        return {}


@lru_cache(maxsize=10_000)  # the same for every call of a tenant
def _one_of(tenant: str, places: int) -> LeaseCharge:
    return LeaseCharge(charge_key(tenant, "concurrency"), places)
