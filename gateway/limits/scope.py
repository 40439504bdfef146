"""What a limit applies to: a tenant, a key, or a part of a tenant's calls. A limit per end user would start here."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from urllib.parse import quote

import msgspec

from gateway.policy import Limits, Model, Tenant


class Scope(msgspec.Struct, frozen=True):
    """The calls that share a limit: all calls of a tenant, or a part of them.

    `part` is empty for all calls of the tenant. Otherwise it is a label such as `key ci` or `model a and class batch`.
    """

    tenant: str
    part: str = ""

    def __str__(self) -> str:
        return f"{self.part} of tenant {self.tenant}" if self.part else f"tenant {self.tenant}"

    def key(self, what: str) -> str:
        """Make the key of a charge. All keys of a tenant begin with its name, as the storage interface requires."""
        part = f"{quote(self.part, safe='')}/" if self.part else ""
        return f"{tenant_prefix(self.tenant)}/{part}{what}"


def scopes_of_call(
    tenant: Tenant, key_id: str, key_limits: Limits | None, model: Model, class_name: str
) -> Iterator[tuple[Scope, Limits]]:
    """Yield the scopes that apply to a call with their limits: the tenant's first, then its parts', then the key's."""
    names = {model.name, *model.aliases}
    yield Scope(tenant.name), tenant.limits
    for part in tenant.limits.parts:
        match = part.match
        if (match.model is None or not names.isdisjoint(match.model)) and (
            match.latency_class is None or class_name in match.latency_class
        ):
            yield Scope(tenant.name, match.label), with_cached_input_weight(part, tenant)
    if key_limits is not None:
        yield key_scope(tenant, key_id), with_cached_input_weight(key_limits, tenant)


def key_scope(tenant: Tenant, key_id: str) -> Scope:
    """Return the scope of one key's calls."""
    return Scope(tenant.name, f"key {key_id}")


def with_cached_input_weight(limits: Limits, tenant: Tenant) -> Limits:
    """Return the limits. If they set no weight of cached input, the tenant's weight is filled in."""
    if limits.cached_input_weight is not None:
        return limits
    return limits.model_copy(update={"cached_input_weight": tenant.limits.cached_input_weight})


@lru_cache(maxsize=10_000)
def tenant_prefix(name: str) -> str:
    """Return the prefix of all charge keys and reservation ids of a tenant."""
    return quote(name, safe="")
