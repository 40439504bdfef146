"""Looks up the limits that apply to a call: those of its tenant and the tenant's ancestors, of its key and end user.

Limits of a tenant may apply to a part of its calls, for example to one model. The limits and the values derived from
them are remembered per key, model, class and end user while the policy stays the same. Keys without limits of their own
share the object of their tenant.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from gateway.limits.base import HighestPrices, Limit, highest_prices
from gateway.limits.budget import BudgetLimit
from gateway.limits.concurrency import ConcurrencyLimit
from gateway.limits.headers import HeaderGroup, header_groups
from gateway.limits.scope import Scope, end_user_scopes, has_end_user_limits, scopes_of_call, tenant_prefix
from gateway.policy import Limits, Policy, Tenant
from gateway.types import Call

MAX_APPLICABLE_LIMITS = 100_000  # pairs of a key and a model that are remembered; keys without limits share an object
MAX_END_USERS = 10_000  # whose limits are remembered


class ApplicableLimits(msgspec.Struct, frozen=True):
    """The limits of all calls of one tenant, key, model and latency class, with values that are derived from them."""

    tenant: Tenant  # from the policy that was in force when this object was made
    key_limits: Limits | None
    id_prefix: str  # of reservation ids
    limits: tuple[Limit[Any], ...]
    prices: HighestPrices
    header_groups: tuple[HeaderGroup, ...]
    holds_slot: bool
    budgets: tuple[BudgetLimit, ...]
    stream_cutting: tuple[BudgetLimit, ...]  # the budgets that may cut a stream
    by_end_user: dict[str | None, ApplicableLimits] | None  # with those of end users; None if they have no limits


class ApplicableLimitsCache:
    """Finds and remembers the limits of calls under the policy of the newest call. Owned by the event loop."""

    def __init__(self, family: Sequence[type[Limit[Any]]]) -> None:
        """`family` is the kinds of limits, in the order in which a rejection names them."""
        self._family = family
        self._policy: Policy | None = None
        self._by_key: dict[tuple[str, str, str], ApplicableLimits] = {}  # by key, model and class
        self._end_users = 0  # in `by_end_user` of all of them

    def find(self, call: Call) -> ApplicableLimits:
        """The limits of a call: those of its key, tenant, model and class, and of its end user if they have limits."""
        principal = call.principal
        if call.policy is not self._policy or len(self._by_key) >= MAX_APPLICABLE_LIMITS:
            self._policy = call.policy
            self._by_key.clear()
            self._end_users = 0
        which = (principal.key_id, call.model_name, call.class_name)
        known = self._by_key.get(which)
        if known is None or known.tenant is not principal.tenant or known.key_limits is not principal.limits:
            known = self._by_key[which] = self._limits_of_key(call)
        if known.by_end_user is not None:
            return self._limits_of_end_user(call, known, known.by_end_user)
        return known

    def _limits_of_key(self, call: Call) -> ApplicableLimits:
        """Return the limits of a key's calls without those of end users: the tenant's object if the key has none."""
        principal, model, class_name = call.principal, call.model, call.class_name
        of_tenant = (f"/{principal.tenant_name}", model.name, class_name)  # no key has an id with a slash
        known = self._by_key.get(of_tenant) if principal.limits is None else None
        if known is None or known.tenant is not principal.tenant:
            scopes = scopes_of_call(principal.tenant, principal.key_id, principal.limits, model, class_name)
            known = self._find_limits(call, scopes, {} if has_end_user_limits(principal.tenant) else None)
            if principal.limits is None:
                self._by_key[of_tenant] = known
        return known

    def _limits_of_end_user(
        self, call: Call, others: ApplicableLimits, by_end_user: dict[str | None, ApplicableLimits]
    ) -> ApplicableLimits:
        """Return the limits of a call together with those of its end user."""
        end_user = call.end_user or None
        known = by_end_user.get(end_user)
        if known is None:
            if self._end_users >= MAX_END_USERS:
                for each in self._by_key.values():
                    if each.by_end_user is not None:
                        each.by_end_user.clear()
                self._end_users = 0
            scopes = end_user_scopes(call.principal.tenant, end_user)
            known = by_end_user[end_user] = self._find_limits(call, scopes, None, others.limits)
            self._end_users += 1
        return known

    def _find_limits(
        self,
        call: Call,
        scopes: Iterable[tuple[Scope, Limits]],
        by_end_user: dict[str | None, ApplicableLimits] | None,
        others: tuple[Limit[Any], ...] = (),
    ) -> ApplicableLimits:
        principal = call.principal
        found = [kind.from_policy(limits, scope) for scope, limits in scopes for kind in self._family]
        limits = others + tuple(limit for limit in found if limit is not None)
        return ApplicableLimits(
            principal.tenant,
            principal.limits,
            f"{tenant_prefix(principal.tenant.root)}/",
            limits,
            # A recovered call's model may have been removed from the policy.
            highest_prices(call.policy.prices_by_model.get(call.model_name, ())),
            header_groups([limit.header_kind for limit in limits]),
            any(isinstance(limit, ConcurrencyLimit) for limit in limits),
            budgets := tuple(limit for limit in limits if isinstance(limit, BudgetLimit)),
            tuple(budget for budget in budgets if budget.cuts_streams),
            by_end_user,
        )
