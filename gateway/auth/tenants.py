"""Creates, changes and deletes the tenants in the storage, for `warmpath tenants` and the admin API.

A stored tenant has the fields of `TenantFields`. Prices, currencies, service tiers and stored responses are in the
policy only: a stored tenant has those of its nearest ancestor in the policy. So the policy's history reproduces the
price of every receipt.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from pydantic import ValidationError

from gateway.auth.records import RecordFeed
from gateway.auth.tenant_directory import TENANT, TenantDirectory
from gateway.core.errors import BadRequest, Conflict, NotFound
from gateway.policy import Policy, Tenant
from gateway.policy.checks import find_contradictions
from gateway.policy.file import findings
from gateway.policy.hierarchy import DEPTH_MAX, lineage
from gateway.policy.tenants import TenantFields

MAX_TENANTS = 100_000  # in one storage


class TenantRegistry:
    """Changes the stored tenants. Checks them against the policy in force."""

    def __init__(self, feed: RecordFeed, directory: TenantDirectory, policy: Callable[[], Policy]) -> None:
        self._feed = feed
        self._directory = directory
        self._policy = policy

    async def refresh(self) -> None:
        """Read what has changed. Raises `StorageUnavailable`."""
        await self._feed.refresh()

    def get(self, name: str) -> dict[str, Any]:
        """Return a tenant of the policy or of the storage in its public form. Raises `NotFound`."""
        if (tenant := self._policy().tenants_by_name.get(name)) is not None:
            given = next(each for each in self._policy().tenants if each.name == tenant.name)
            return public_form(given, "policy")
        return public_form(self._stored(name), "storage")

    def find(self, name: str) -> Tenant | None:
        """Return a tenant with what it inherits, or None if there is none. Raises `StorageUnavailable`."""
        return self._directory.find(name, self._policy())

    def all(self) -> Iterator[Tenant]:
        """Yield all tenants that may call, those of the policy first."""
        return self._directory.all(self._policy())

    def stored_names(self) -> list[str]:
        """Return the names of the stored tenants, sorted."""
        return self._directory.names()

    def belongs_to(self, name: str, organisation: str) -> bool:
        """Return whether a tenant is another one, or one of its descendants."""
        tenant = self.find(name)
        return tenant is not None and organisation in (name, *tenant.parents)

    def names(self) -> list[str]:
        """Return the names of all tenants, sorted."""
        return sorted({*self._policy().tenants_by_name, *self._directory.names()})

    async def create(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Add a tenant. Raises `BadRequest`, which names the field, or `Conflict` if the name is taken."""
        tenant = parse_tenant(fields)
        if tenant.name in self._policy().tenants_by_name or self._directory.stored(tenant.name) is not None:
            raise Conflict(f"there is a tenant {tenant.name!r} already", param="name")
        if len(self._feed.of_kind(TENANT)) >= MAX_TENANTS:
            raise Conflict(f"there are {MAX_TENANTS} stored tenants, which is the most")
        return await self._put(tenant)

    async def change(self, name: str, changes: Mapping[str, Any]) -> dict[str, Any]:
        """Change fields of a stored tenant. A field that is None returns to its default. Raises like `create`."""
        known = self._changeable(name)
        if changes.get("name", name) != name:
            raise BadRequest("a tenant cannot be renamed, since receipts name it", param="name")
        fields = known.model_dump(mode="json", by_alias=True, exclude_unset=True)
        merged = {**fields, **changes}
        return await self._put(parse_tenant({field: value for field, value in merged.items() if value is not None}))

    async def delete(self, name: str) -> dict[str, Any]:
        """Delete a stored tenant. Its keys are refused from then on. Raises `NotFound`, or `Conflict` for a parent."""
        known = self._changeable(name)
        children = [each for each in self.names() if self.get(each)["parent"] == name]
        if children:
            raise Conflict(f"the tenant {name!r} is the parent of {', '.join(children[:5])}; delete or move them first")
        if not await self._feed.change(TENANT, name, None):
            raise Conflict(f"the tenant {name!r} is being changed by another process; try again")
        return {**public_form(known, "storage"), "deleted": True}

    def export(self) -> list[dict[str, Any]]:
        """Return all stored tenants with the fields that they set, each after its parent."""
        stored = {name: fields for name in self._directory.names() if (fields := self._directory.stored(name))}
        whole = sorted(stored.values(), key=lambda each: (len(list(lineage(each.name, stored.get))), each.name))
        return [each.model_dump(mode="json", by_alias=True, exclude_unset=True) for each in whole]

    async def put(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Create or replace a stored tenant, for imports. Raises like `create`."""
        tenant = parse_tenant(fields)
        if tenant.name in self._policy().tenants_by_name:
            raise Conflict(f"the tenant {tenant.name!r} is in the policy, which wins", param="name")
        return await self._put(tenant)

    def _stored(self, name: str) -> TenantFields:
        known = self._directory.stored(name)
        if known is None:
            raise NotFound(f"there is no tenant {name!r}", param="name")
        return known

    def _changeable(self, name: str) -> TenantFields:
        if name in self._policy().tenants_by_name:
            raise Conflict(f"the tenant {name!r} is in the policy: change it there", param="name")
        return self._stored(name)

    async def _put(self, tenant: TenantFields) -> dict[str, Any]:
        self._check(tenant)
        if not await self._feed.change(TENANT, tenant.name, tenant.model_dump_json(by_alias=True, exclude_unset=True)):
            raise Conflict(f"the tenant {tenant.name!r} is being changed by another process; try again")
        return public_form(tenant, "storage")

    def _check(self, tenant: TenantFields) -> None:
        """Check a tenant as if it were in the policy, with its ancestors. Raises `BadRequest`."""
        policy = self._policy()

        def find(name: str) -> TenantFields | None:
            if name == tenant.name:
                return tenant
            return policy.tenants_by_name.get(name) or self._directory.stored(name)

        chain = list(lineage(tenant.name, find))
        of_others = [each for each in chain[1:] if each.name != tenant.name]
        tenants = (*(_as_tenant(each) for each in of_others), _as_tenant(tenant))
        fields = {name: getattr(policy, name) for name in Policy.model_fields}
        found = find_contradictions(Policy.model_construct(**{**fields, "tenants": tenants}))
        for path, message in found:
            if path[:2] == ("tenants", len(tenants) - 1):
                raise BadRequest(message, param=".".join(map(str, path[2:])))
        if len(chain) + self._levels_below(tenant.name) > DEPTH_MAX:
            raise BadRequest(f"its descendants would have more than {DEPTH_MAX - 1} ancestors", param="parent")

    def _levels_below(self, name: str) -> int:
        """The number of levels of tenants below a tenant."""
        children: dict[str, list[str]] = {}
        policy = self._policy()
        tenants = [*policy.tenants, *filter(None, map(self._directory.stored, self._directory.names()))]
        for each in tenants if self._directory.stored(name) is not None else ():  # a new tenant has none
            if each.parent is not None:
                children.setdefault(each.parent, []).append(each.name)
        level, levels = children.get(name, []), 0
        while level and levels <= DEPTH_MAX:
            level, levels = [child for each in level for child in children.get(each, ())], levels + 1
        return levels


def parse_tenant(fields: Mapping[str, Any]) -> TenantFields:
    """Parse the fields of a stored tenant. Raises `BadRequest`, which names the field."""
    for field in set(Tenant.model_fields) - set(TenantFields.model_fields):
        if field in fields:
            where = "`warmpath keys`" if field == "keys" else "the policy"
            raise BadRequest(f"a stored tenant has no {field}: use {where}", param=field)
    try:
        return TenantFields.model_validate(fields)
    except ValidationError as error:
        path, message = next(iter(findings(error, TenantFields)))
        raise BadRequest(message, param=".".join(map(str, path)) or None) from None


def public_form(tenant: TenantFields, source: str) -> dict[str, Any]:
    """Return a tenant for the admin API and the CLI. `source` is where it is defined: policy or storage."""
    return {
        "object": "warmpath.tenant",
        "name": tenant.name,
        "parent": tenant.parent,
        "source": source,
        "disabled": tenant.disabled,
        "models": tenant.models,
        "limits": tenant.limits.model_dump(mode="json", by_alias=True, exclude_unset=True),
        "cache_group": tenant.cache_group,
    }


def _as_tenant(fields: TenantFields) -> Tenant:
    if isinstance(fields, Tenant):
        return fields
    return Tenant(**{name: getattr(fields, name) for name in TenantFields.model_fields})
