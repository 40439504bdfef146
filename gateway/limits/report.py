"""Reports the remaining amount of every limit of a tenant: its own, those of its parts, its keys and one end user."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from gateway.limits.base import CallEstimate, Limit
from gateway.limits.budget import BudgetLimit, nanos_to_text
from gateway.limits.scope import Scope, end_user_scopes, key_scope, tenant_scope, with_cached_input_weight
from gateway.policy import Limits, Tenant
from gateway.storage.base import Charge, RateCharge, ReservationStore, SpendCharge


async def remaining_limits(
    tenant: Tenant,
    keys: Mapping[str, Limits],
    family: Sequence[type[Limit[Any]]],
    counters: ReservationStore,
    *,
    now: float,
    end_user: str | None = None,
) -> list[dict[str, Any]]:
    """Return what is left of each limit of a tenant, the tenant's own limits first. Reserves nothing.

    `keys` has the limits of the tenant's keys by their ids. With `end_user`, that one's limits are added. Raises
    `StorageUnavailable`.
    """
    nothing = CallEstimate(0, 0, False, 0, now)
    scopes = [*_scopes(tenant, keys), *(end_user_scopes(tenant, end_user) if end_user is not None else ())]
    found = [kind.from_policy(own, scope) for scope, own in scopes for kind in family]
    limits = [limit for limit in found if limit is not None]
    charges: list[Charge] = [limit.charge(nothing) for limit in limits]
    left = await counters.remaining(charges, now=now)
    return [_entry(*each) for each in zip(limits, charges, left, strict=True)]


def has_limits(tenant: Tenant, family: Sequence[type[Limit[Any]]]) -> bool:
    """Return whether the policy sets a limit for a tenant, a part of its calls, its end users or one of its keys."""
    keys = {key.id: key.limits for key in tenant.keys if key.limits is not None}
    scopes = [*_scopes(tenant, keys), *end_user_scopes(tenant, None)]
    return any(kind.from_policy(own, scope) for scope, own in scopes for kind in family)


def _scopes(tenant: Tenant, keys: Mapping[str, Limits]) -> Iterator[tuple[Scope, Limits]]:
    yield tenant_scope(tenant), tenant.limits
    for part in tenant.limits.parts:
        yield tenant_scope(tenant, part.match.label), with_cached_input_weight(part, tenant)
    for key_id, limits in keys.items():
        yield key_scope(tenant, key_id), with_cached_input_weight(limits, tenant)


def _entry(limit: Limit[Any], charge: Charge, left: int) -> dict[str, Any]:
    entry = {"scope": str(limit.scope), "limit": limit.kind}
    if isinstance(charge, SpendCharge):
        period = charge.key.rpartition("/")[2]
        amount = limit.amount_nanos if isinstance(limit, BudgetLimit) else charge.limit
        left = amount - (charge.limit - left)  # of a soft budget, which may be overspent, below zero
        return {**entry, "amount": nanos_to_text(amount), "left": nanos_to_text(left), "period": period}
    if isinstance(charge, RateCharge):
        return {
            **entry,
            "amount": charge.limit,
            "left": min(left, charge.limit),
            "period_seconds": charge.period_seconds,
        }
    return {**entry, "amount": charge.limit, "left": left}
