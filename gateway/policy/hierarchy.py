"""The hierarchy of tenants, as organisation, project, team and user.

Calls of a tenant count towards the limits of all its ancestors (`gateway.limits.scope`). Here a tenant gets what it
inherits: of what it does not set itself, its parent's prices, currency, service tiers, stored responses, default
output tokens and cap. Models are not inherited: a call must be allowed by the tenant and by each ancestor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

from gateway.policy.findings import Finding, choices
from gateway.policy.tenants import Tenant, TenantFields

DEPTH_MAX = 8  # levels of tenants, the outermost and the innermost included

_INHERITED = ("pricing", "currency", "service_tiers", "responses")
_INHERITED_LIMITS = ("default_output_tokens", "cap_output")

AnyTenant = TypeVar("AnyTenant", bound=TenantFields)


def with_parent(tenant: Tenant, parent: Tenant | None, *, is_stored: bool = False) -> Tenant:
    """Return a tenant with what it inherits from its parent, which already has what it inherits itself.

    A stored tenant has the prices of its nearest ancestor in the policy, which reproduces the price of each receipt.
    """
    if parent is None and not is_stored:
        return tenant
    changes: dict[str, Any] = {}
    if parent is not None:
        changes = {name: getattr(parent, name) for name in _INHERITED if not getattr(tenant, name)}
        limits = {
            name: getattr(parent.limits, name)
            for name in _INHERITED_LIMITS
            if name not in tenant.limits.model_fields_set
        }
        changes["limits"] = tenant.limits.model_copy(update=limits)
    whole = tenant.model_copy(update=changes)
    # A frozen model's cached properties are set in its `__dict__`, as `cached_property` itself does.
    whole.__dict__["ancestors"] = () if parent is None else (*parent.ancestors, parent)
    if is_stored and parent is not None:
        whole.__dict__["priced_as"] = parent.priced_as
    return whole


def with_ancestors(tenants: Iterable[Tenant]) -> dict[str, Tenant]:
    """Return tenants by name, each with what it inherits. Unknown parents and cycles, which checks report, are cut."""
    given = {tenant.name: tenant for tenant in tenants}
    whole: dict[str, Tenant] = {}

    def find(name: str, below: tuple[str, ...]) -> Tenant | None:
        tenant = given.get(name)
        if name in whole or tenant is None or name in below:
            return whole.get(name)
        parent = None if tenant.parent is None else find(tenant.parent, (*below, name))
        return whole.setdefault(name, with_parent(tenant, parent))

    for name in given:
        find(name, ())
    return {name: whole[name] for name in given}


def lineage(name: str, find: Callable[[str], AnyTenant | None]) -> Iterator[AnyTenant]:
    """Yield a tenant, its parent and so on, up to one more than `DEPTH_MAX`. Ends at an unknown name."""
    for _ in range(DEPTH_MAX + 1):
        tenant = find(name)
        if tenant is None:
            return
        yield tenant
        if tenant.parent is None:
            return
        name = tenant.parent


def why_misplaced(tenant: TenantFields, known: Mapping[str, TenantFields]) -> str | None:
    """Return what is wrong with a tenant's parent: it is unknown, a cycle, or too deep. None if it is right."""
    if tenant.parent is None:
        return None
    if tenant.parent not in known and tenant.parent != tenant.name:
        return f"there is no tenant {tenant.parent!r}; {choices(tenant.parent, known)}"

    def find(name: str) -> TenantFields | None:
        return tenant if name == tenant.name else known.get(name)

    names = [each.name for each in lineage(tenant.name, find)]
    if len(set(names)) < len(names):
        return f"its ancestors form a cycle: {', '.join(dict.fromkeys(names))}"
    if len(names) > DEPTH_MAX:
        return f"a tenant can have at most {DEPTH_MAX - 1} ancestors"
    return None


def contradicting_currency(tenant: Tenant, parent: Tenant) -> str | None:
    """Return the message for a tenant whose currency is not that of its parent, whose budgets its calls also spend."""
    if tenant.currency is None or tenant.currency == parent.currency:
        return None
    own = "the prices' currency" if parent.currency is None else parent.currency
    return f"the parent {parent.name!r} has {own}, and its limits count this tenant's calls, too"


def check_hierarchy(tenants: Iterable[Tenant]) -> Iterator[Finding]:
    """Find wrong parents and currencies among the tenants of a policy."""
    tenants = tuple(tenants)
    known = {tenant.name: tenant for tenant in tenants}
    whole = with_ancestors(tenants)
    for i, tenant in enumerate(tenants):
        if tenant.parent is None:
            continue
        if (wrong := why_misplaced(tenant, known)) is not None:
            yield ("tenants", i, "parent"), wrong
        elif (wrong := contradicting_currency(tenant, whole[tenant.parent])) is not None:
            yield ("tenants", i, "currency"), wrong
