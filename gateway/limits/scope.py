"""What a limit applies to: a tenant, a key, an end user, or a part of a tenant's calls.

A call counts towards the limits of its tenant and of all the tenant's ancestors. One storage operation reserves all of
them, so the keys of all tenants with one outermost ancestor (root) begin with the root's name.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from hashlib import blake2b
from urllib.parse import quote

import msgspec

from gateway.policy import Limits, Model, Tenant

END_USER_BYTES = 12  # of the digest of an end user's name in keys


class Scope(msgspec.Struct, frozen=True):
    """The calls that share a limit: all calls of a tenant and its descendants, or a part of them.

    `part` is empty for all calls. Otherwise it is a label such as `key ci` or `model a and class batch`. `root` is the
    tenant's outermost ancestor, or empty if the tenant has no parent. `shown` replaces `part` in messages.
    """

    tenant: str
    part: str = ""
    root: str = ""
    shown: str = ""

    def __str__(self) -> str:
        return f"{self.shown or self.part} of tenant {self.tenant}" if self.part else f"tenant {self.tenant}"

    def key(self, what: str) -> str:
        """Make the key of a charge. All keys of a root begin with its name, as the storage interface requires."""
        part = f"{quote(self.part, safe='')}/" if self.part else ""
        if self.root:
            part = f"{quote(f'tenant {self.tenant}', safe='')}/{part}"
        return f"{tenant_prefix(self.root or self.tenant)}/{part}{what}"


def scopes_of_call(
    tenant: Tenant, key_id: str, key_limits: Limits | None, model: Model, class_name: str
) -> Iterator[tuple[Scope, Limits]]:
    """Yield the scopes that apply to a call, with their limits. Those of its end user are not among them.

    The outermost ancestor comes first, then its parts, and so on to the tenant, its parts, and the key.
    """
    names = {model.name, *model.aliases}
    for each in (*tenant.ancestors, tenant):
        yield tenant_scope(each), each.limits
        for part in each.limits.parts:
            match = part.match
            if (match.model is None or not names.isdisjoint(match.model)) and (
                match.latency_class is None or class_name in match.latency_class
            ):
                yield tenant_scope(each, match.label), with_cached_input_weight(part, each)
    if key_limits is not None:
        yield key_scope(tenant, key_id), with_cached_input_weight(key_limits, tenant)


def has_end_user_limits(tenant: Tenant) -> bool:
    """Return whether the tenant or one of its ancestors limits its end users."""
    return any(each.limits.end_users is not None for each in (*tenant.ancestors, tenant))


def end_user_scopes(tenant: Tenant, end_user: str | None) -> Iterator[tuple[Scope, Limits]]:
    """Yield the scopes of a call's end user with their limits, those of the outermost ancestor first.

    The storage gets a digest of the end user's name, which may be personal data.
    """
    digest = "-" if not end_user else blake2b(end_user.encode(), digest_size=END_USER_BYTES).hexdigest()
    shown = "the end user" if end_user else "the end user without a name"
    for each in (*tenant.ancestors, tenant):
        if each.limits.end_users is not None:
            scope = msgspec.structs.replace(tenant_scope(each, f"end user {digest}"), shown=shown)
            yield scope, with_cached_input_weight(each.limits.end_users, each)


def tenant_scope(tenant: Tenant, part: str = "") -> Scope:
    """Return the scope of a tenant's calls and its descendants', or of a part of them."""
    return Scope(tenant.name, part, tenant.root if tenant.ancestors else "")


def key_scope(tenant: Tenant, key_id: str) -> Scope:
    """Return the scope of one key's calls."""
    return tenant_scope(tenant, f"key {key_id}")


def with_cached_input_weight(limits: Limits, tenant: Tenant) -> Limits:
    """Return the limits. If they set no weight of cached input, the tenant's weight is filled in."""
    if limits.cached_input_weight is not None:
        return limits
    return limits.model_copy(update={"cached_input_weight": tenant.limits.cached_input_weight})


@lru_cache(maxsize=10_000)
def tenant_prefix(root: str) -> str:
    """Return the prefix of all charge keys and reservation ids of a tenant without a parent, and of its descendants."""
    return quote(root, safe="")
