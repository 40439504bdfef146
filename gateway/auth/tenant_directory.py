"""Finds tenants: those of the policy, and those that are managed at run time and stored in the storage.

A tenant of the policy wins over a stored one of the same name. A stored tenant is parsed when it is first used. Its
object stays the same until it, an ancestor or the policy changes, so that caches can compare it by identity. A stored
tenant whose parent does not exist is not found: without the limits of its ancestors it must not call.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping

from pydantic import ValidationError

from gateway.auth.records import RecordFeed
from gateway.core.errors import StorageUnavailable
from gateway.policy import Policy, Tenant
from gateway.policy.hierarchy import DEPTH_MAX, with_parent
from gateway.policy.tenants import TenantFields
from gateway.storage.base import StoredRecord

TENANT = "tenant"  # the kind of these records

log = logging.getLogger(__name__)


class TenantDirectory:
    """The tenants of a policy and of a storage. Must be used on one event loop."""

    def __init__(self, feed: RecordFeed) -> None:
        self._feed = feed
        self._policy: Policy | None = None
        self._found: dict[str, Tenant | None] = {}  # stored tenants with what they inherit from that policy's
        feed.subscribe(TENANT, self._changed)

    def find(self, name: str, policy: Policy) -> Tenant | None:
        """Return a tenant with what it inherits, or None if there is none.

        Raises `StorageUnavailable` if the storage has not been read since the start.
        """
        tenant = policy.tenants_by_name.get(name)
        if tenant is not None:
            return tenant
        if policy is not self._policy:
            self._policy, self._found = policy, {}
        if name in self._found:
            return self._found[name]
        if not self._feed.has_read:
            raise StorageUnavailable("the tenants have not been read from the storage yet")
        if name not in self._feed.of_kind(TENANT):
            return None
        return self._find_stored(name, policy, DEPTH_MAX)

    def stored(self, name: str) -> TenantFields | None:
        """Return a tenant as it is stored, even if the policy has one of the same name."""
        record = self._feed.of_kind(TENANT).get(name)
        return None if record is None else _parse(record)

    def names(self) -> list[str]:
        """Return the names of all stored tenants, sorted."""
        return sorted(self._feed.of_kind(TENANT))

    def all(self, policy: Policy) -> Iterator[Tenant]:
        """Yield all tenants that may call, those of the policy first."""
        yield from policy.tenants_by_name.values()
        for name in self.names():
            tenant = self.find(name, policy) if name not in policy.tenants_by_name else None
            if tenant is not None:
                yield tenant

    def _find_stored(self, name: str, policy: Policy, levels: int) -> Tenant | None:
        fields = self.stored(name) if levels else None
        whole = None
        if fields is not None:
            parent = None
            if fields.parent is not None:
                parent = policy.tenants_by_name.get(fields.parent) or self._find_stored(
                    fields.parent, policy, levels - 1
                )
            if parent is None and fields.parent is not None:
                log.warning("the stored tenant %r may not call: its parent %r does not exist", name, fields.parent)
            else:
                tenant = Tenant(**{field: getattr(fields, field) for field in TenantFields.model_fields})
                whole = with_parent(tenant, parent, is_stored=True)
        if name in self._feed.of_kind(TENANT):
            self._found.setdefault(name, whole)
            return self._found[name]
        return whole

    def _changed(self, records: Mapping[str, StoredRecord]) -> None:
        self._found = {
            name: tenant
            for name, tenant in self._found.items()
            if tenant is not None and name not in records and records.keys().isdisjoint(tenant.parents)
        }


def _parse(record: StoredRecord) -> TenantFields | None:
    try:
        return TenantFields.model_validate_json(record.value or "")
    except ValidationError as error:
        log.error("the stored tenant %r cannot be read: %s", record.name, error.errors(include_url=False)[0]["msg"])
        return None
