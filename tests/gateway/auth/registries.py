"""Makes registries of stored tenants, for tests."""

from __future__ import annotations

from collections.abc import Callable

from gateway.auth.records import RecordFeed
from gateway.auth.tenant_directory import TenantDirectory
from gateway.auth.tenants import TenantRegistry
from gateway.policy import Policy
from gateway.storage.base import RecordStore
from gateway.storage.memory import MemoryStorage
from tests.gateway.calls import a_policy


def a_registry(storage: RecordStore | None = None, policy: Callable[[], Policy] | None = None) -> TenantRegistry:
    """A registry that has read nothing yet, over an empty storage by default."""
    feed = RecordFeed(storage or MemoryStorage())
    known = a_policy()
    return TenantRegistry(feed, TenantDirectory(feed), policy or (lambda: known))
