"""What is left now of every limit of a tenant, its parts and its keys."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from gateway.limits.base import Estimate, Limit
from gateway.limits.budget import nanos_text
from gateway.limits.scope import Scope, key_scope, with_cached_input_weight
from gateway.policy import Limits, Tenant
from gateway.storage.base import Charge, RateCharge, ReservationStore, SpendCharge


async def remaining_limits(
    tenant: Tenant,
    keys: Mapping[str, Limits],
    family: Sequence[type[Limit[Any]]],
    counters: ReservationStore,
    *,
    now: float,
) -> list[dict[str, Any]]:
    """One entry for each limit, the tenant's own first; `keys` are the limits of its keys. Takes nothing."""
    nothing = Estimate(0, 0, False, 0, now)
    limits = [limit for scope, own in _scopes(tenant, keys) for kind in family if (limit := kind.of(own, scope))]
    charges: list[Charge] = [limit.charge(nothing) for limit in limits]
    left = await counters.remaining(charges, now=now)
    return [_entry(*each) for each in zip(limits, charges, left, strict=True)]


def has_limits(tenant: Tenant, family: Sequence[type[Limit[Any]]]) -> bool:
    """Whether the policy limits a tenant, a part of its calls, or a key of its own."""
    keys = {key.id: key.limits for key in tenant.keys if key.limits is not None}
    return any(kind.of(own, scope) for scope, own in _scopes(tenant, keys) for kind in family)


def _scopes(tenant: Tenant, keys: Mapping[str, Limits]) -> Iterator[tuple[Scope, Limits]]:
    yield Scope(tenant.name), tenant.limits
    for part in tenant.limits.parts:
        yield Scope(tenant.name, part.match.label), with_cached_input_weight(part, tenant)
    for key_id, limits in keys.items():
        yield key_scope(tenant, key_id), with_cached_input_weight(limits, tenant)


def _entry(limit: Limit[Any], charge: Charge, left: int) -> dict[str, Any]:
    entry = {"scope": str(limit.scope), "limit": limit.kind}
    if isinstance(charge, SpendCharge):
        period = charge.key.rpartition("/")[2]
        return {**entry, "amount": nanos_text(charge.limit), "left": nanos_text(left), "period": period}
    if isinstance(charge, RateCharge):
        return {
            **entry,
            "amount": charge.limit,
            "left": min(left, charge.limit),
            "period_seconds": charge.period_seconds,
        }
    return {**entry, "amount": charge.limit, "left": left}
