"""Phase 1: authenticates a request by the API key in its headers. Keys are stored as hashes.

Keys of the policy that were valid before are found by a digest of the whole key, which reveals nothing about where two
keys differ. What a client presents as its key is kept nowhere, whether it is valid or not. Any other key is looked up
by its public id, first in the policy and then in the storage, and its hash is compared in constant time. Records are
cached for `REMEMBER_SECONDS`, so a revocation takes effect soon. The absence of a record is cached as well, so guessed
keys cause few reads of the storage. Requests that need the same record at the same time share one read.

If the storage is unreachable and the policy lets calls continue (`storage_outage: {limits: local_share}`), a key's last
record stays valid for `OUTAGE_SECONDS`. If a replica has not read a revocation before the outage, it accepts the key
for that time.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import time
from collections import OrderedDict
from collections.abc import Mapping
from functools import partial

import msgspec

from gateway.auth.tenant_directory import TenantDirectory
from gateway.core.api_keys import MAX_KEY_CHARACTERS, hash_key, parse_key, verify
from gateway.core.errors import Forbidden, StorageUnavailable, Unauthenticated
from gateway.core.times import has_passed
from gateway.policy import Limits, Policy, Tenant
from gateway.storage.base import KeyRecord, KeyStore
from gateway.types import Principal

REMEMBER_SECONDS = 1.0
REMEMBERED_KEYS_MAX = 50_000
OUTAGE_SECONDS = 600.0
DIGEST_BYTES = DIGEST_KEY_BYTES = 16
NOT_VALID = "the API key is not valid"
ASK_AGAIN_SECONDS = 1.0  # pause between reads while the storage is unreachable; no request waits for it meanwhile


class _Read(msgspec.Struct, frozen=True):
    """A key's record, when it was read (monotonic seconds), and its fields in the form in which they are used."""

    at: float
    record: KeyRecord | None
    models: frozenset[str] | None = None
    classes: frozenset[str] | None = None
    limits: Limits | None = None


class Authenticator:
    """Finds the principal of an API key. Its caches are bounded by `REMEMBERED_KEYS_MAX` and the policy's keys."""

    def __init__(self, keys: KeyStore, pepper: str, tenants: TenantDirectory | None = None) -> None:
        """`tenants` finds stored tenants; without it, only the policy has tenants."""
        self._keys = keys
        self._tenants = tenants
        self._pepper = pepper
        self._remembered: OrderedDict[str, _Read] = OrderedDict()
        self._policy: Policy | None = None
        self._known: dict[bytes, Principal] = {}  # that policy's own keys, by digest
        self._digest_key = secrets.token_bytes(DIGEST_KEY_BYTES)  # so that a digest is worth nothing elsewhere
        self._principals: dict[str, Principal] = {}  # by key id
        self._reads: dict[str, asyncio.Task[_Read]] = {}  # in flight, by key id
        self._ask_after = 0.0  # monotonic seconds; set while the storage is unreachable
        # Keys with an unknown id are compared with this hash, so that they take as long as keys with a wrong secret.
        self._unmatched_hash = hash_key("nobody", pepper)

    async def authenticate(self, headers: Mapping[bytes, bytes], policy: Policy) -> Principal:
        """Return the caller. Raises `Unauthenticated`, with the same message whether the id or the secret is wrong.

        Raises `Forbidden` if the tenant of a valid key is disabled.
        """
        key = _presented(headers)
        if policy is not self._policy:
            self._policy, self._known, self._principals = policy, {}, {}
        digest = hashlib.blake2b(key.encode(), key=self._digest_key, digest_size=DIGEST_BYTES).digest()
        principal = self._known.get(digest)
        if principal is not None:
            return principal
        parsed = parse_key(key)
        key_id = parsed[0] if parsed else ""
        if entry := policy.keys_by_id.get(key_id):
            tenant, known = entry
            if verify(key, known.hash, self._pepper):
                check_enabled(tenant)
                principal = self._principal(key_id, tenant, _set(known.models), _set(known.classes), known.limits)
                self._known[digest] = principal  # at most one entry per key of the policy: only a valid key gets here
                return principal
        elif parsed and (read := await self._read(key_id, policy)).record is not None:
            owner = self.tenant(read.record.tenant, policy)
            if self._opens(key, read.record) and owner is not None:
                check_enabled(owner)
                return self._principal(key_id, owner, read.models, read.classes, read.limits)
        else:
            verify(key, self._unmatched_hash, self._pepper)
        raise Unauthenticated(NOT_VALID)

    def _principal(
        self, key_id: str, owner: Tenant, models: frozenset[str] | None, classes: frozenset[str] | None,
        limits: Limits | None,
    ) -> Principal:  # fmt: skip
        """Return the principal of a key: always the same object while nothing changes, as a cache key."""
        known = self._principals.get(key_id)
        if (
            known is None
            or known.tenant is not owner
            or (known.models, known.classes) != (models, classes)
            or known.limits is not limits
        ):
            if len(self._principals) >= REMEMBERED_KEYS_MAX:
                self._principals.clear()
            known = self._principals[key_id] = Principal(owner, key_id, models, classes, limits)
        return known

    async def principal_of(self, key_id: str, policy: Policy) -> Principal | None:
        """Return the principal of a key that was authenticated earlier, as for a batch. None if no longer valid."""
        if entry := policy.keys_by_id.get(key_id):
            tenant, known = entry
            return self._principal(key_id, tenant, _set(known.models), _set(known.classes), known.limits)
        read = await self._read(key_id, policy)
        owner = self.tenant(read.record.tenant, policy) if read.record is not None else None
        if read.record is None or owner is None or read.record.revoked or has_passed(read.record.expires):
            return None
        return self._principal(key_id, owner, read.models, read.classes, read.limits)

    def tenant(self, name: str, policy: Policy) -> Tenant | None:
        """Return a tenant of the policy or of the storage. Raises `StorageUnavailable`."""
        if self._tenants is None:
            return policy.tenants_by_name.get(name)
        return self._tenants.find(name, policy)

    def _opens(self, key: str, record: KeyRecord) -> bool:
        right = verify(key, record.hash, self._pepper)
        if not right and record.old_hash is not None:
            right = verify(key, record.old_hash, self._pepper) and not has_passed(record.old_expires)
        return right and not record.revoked and not has_passed(record.expires)

    async def _read(self, key_id: str, policy: Policy) -> _Read:
        now = time.monotonic()
        last = self._remembered.get(key_id)
        if last is not None and now - last.at < REMEMBER_SECONDS:
            return last
        may_reuse = policy.storage_outage.limits != "refuse" and last is not None and now - last.at < OUTAGE_SECONDS
        if last is not None and may_reuse and now < self._ask_after:
            return last
        try:
            return await self._read_once(key_id)
        except StorageUnavailable:
            self._ask_after = time.monotonic() + ASK_AGAIN_SECONDS
            if last is None or not may_reuse:
                raise
            return last

    async def _read_once(self, key_id: str) -> _Read:
        """Read and remember a record. Joins the read of the same record that is in flight, if there is one.

        The read is a task of its own, so it survives the request that began it.
        """
        read = self._reads.get(key_id)
        if read is None:
            read = self._reads[key_id] = asyncio.ensure_future(self._read_storage(key_id))
            read.add_done_callback(partial(self._read_done, key_id))
        return await asyncio.shield(read)

    def _read_done(self, key_id: str, read: asyncio.Task[_Read]) -> None:
        del self._reads[key_id]
        if not read.cancelled():
            read.exception()  # marks it as retrieved, in case no request waits any more

    async def _read_storage(self, key_id: str) -> _Read:
        began, last = time.monotonic(), self._remembered.get(key_id)
        record = await self._keys.get_key(key_id)
        if last is not None and record == last.record:
            read = msgspec.structs.replace(last, at=began)  # keeps the same limits object
        else:
            read = _as_used(began, record)
        self._remembered[key_id] = read
        self._remembered.move_to_end(key_id)
        if len(self._remembered) > REMEMBERED_KEYS_MAX:
            self._remembered.popitem(last=False)
        return read


def _as_used(now: float, record: KeyRecord | None) -> _Read:
    if record is None:
        return _Read(now, None)
    limits = None if record.limits is None else Limits.model_validate(record.limits)
    return _Read(now, record, _set(record.models), _set(record.classes), limits)


def check_enabled(tenant: Tenant) -> None:
    """Raise `Forbidden` if a tenant or one of its ancestors is disabled."""
    if tenant.is_disabled:
        which = next(each.name for each in (*tenant.ancestors, tenant) if each.disabled)
        raise Forbidden(f"the tenant {which!r} is disabled")


def _set(names: tuple[str, ...] | None) -> frozenset[str] | None:
    return None if names is None else frozenset(names)


def _presented(headers: Mapping[bytes, bytes]) -> str:
    """Return the key in `Authorization: Bearer` or `x-api-key`. Raises `Unauthenticated` if there is none."""
    scheme, _, token = headers.get(b"authorization", b"").partition(b" ")
    key = token.strip() if scheme.lower() == b"bearer" else headers.get(b"x-api-key", b"").strip()
    if len(key) > MAX_KEY_CHARACTERS:
        raise Unauthenticated(NOT_VALID)
    if not key:
        raise Unauthenticated("no API key: send it as `Authorization: Bearer <key>`")
    return key.decode("latin-1")
