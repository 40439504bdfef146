"""Phase 1: headers -> `Principal`. Keys are stored hashed and compared in constant time.

A valid key of the policy is recognised by a dictionary lookup, whose seeded hash reveals nothing about where two keys
differ. Any other key is looked up by its public id, in the policy and then in the storage. Records are cached for
`REMEMBER_SECONDS`, absent ones too, so that guessing costs the storage nothing and a revocation takes effect soon.

If the storage is unreachable and the policy lets calls continue (`storage_outage: {limits: local_share}`), a key's last
record stays valid for `OUTAGE_SECONDS`. A replica that has not seen a revocation by then accepts the key for so long.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Mapping

import msgspec

from gateway.core.api_keys import hash_key, parse_key, verify
from gateway.core.errors import StorageUnavailable, Unauthenticated
from gateway.core.times import has_passed
from gateway.policy import Limits, Policy, Tenant
from gateway.storage.base import KeyRecord, KeyStore
from gateway.types import Principal

REMEMBER_SECONDS = 1.0
REMEMBERED_KEYS_MAX = 10_000
OUTAGE_SECONDS = 600.0
ASK_AGAIN_SECONDS = 1.0  # pause between reads while the storage is unreachable; no request waits for it meanwhile


class _Read(msgspec.Struct, frozen=True):
    """A key's record and when it was read (monotonic seconds), with its fields in the form in which they are used."""

    at: float
    record: KeyRecord | None
    models: frozenset[str] | None = None
    classes: frozenset[str] | None = None
    limits: Limits | None = None


class Authenticator:
    """Recognises keys. One per gateway; its caches are bounded by `REMEMBERED_KEYS_MAX` and the policy's keys."""

    def __init__(self, keys: KeyStore, pepper: str) -> None:
        self._keys = keys
        self._pepper = pepper
        self._remembered: OrderedDict[str, _Read] = OrderedDict()
        self._policy: Policy | None = None
        self._known: dict[str, Principal] = {}  # that policy's own keys, by the key as presented
        self._principals: dict[str, Principal] = {}  # by key id
        self._ask_after = 0.0  # monotonic seconds; set while the storage is unreachable
        # Compared with if there is no record, so that an unknown id takes as long as a wrong secret.
        self._unmatched_hash = hash_key("nobody", pepper)

    async def authenticate(self, headers: Mapping[bytes, bytes], policy: Policy) -> Principal:
        """Who calls. Raises `Unauthenticated` with the same message whether the id or the secret is wrong."""
        key = _presented(headers)
        if policy is not self._policy:
            self._policy, self._known, self._principals = policy, {}, {}
        principal = self._known.get(key)
        if principal is not None:
            return principal
        parsed = parse_key(key)
        key_id = parsed[0] if parsed else ""
        if entry := policy.keys_by_id.get(key_id):
            tenant, known = entry
            if verify(key, known.hash, self._pepper):
                principal = self._principal(key_id, tenant, _set(known.models), _set(known.classes), known.limits)
                self._known[key] = principal  # at most one entry per key of the policy: only a valid key gets here
                return principal
        elif parsed and (read := await self._read(key_id, policy)).record is not None:
            owner = policy.tenants_by_name.get(read.record.tenant)
            if self._opens(key, read.record) and owner is not None:
                return self._principal(key_id, owner, read.models, read.classes, read.limits)
        else:
            verify(key, self._unmatched_hash, self._pepper)
        raise Unauthenticated("the API key is not valid")

    def _principal(
        self, key_id: str, owner: Tenant, models: frozenset[str] | None, classes: frozenset[str] | None,
        limits: Limits | None,
    ) -> Principal:  # fmt: skip
        """The principal of a key: the same object until something changes. Later phases cache by its identity."""
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
        """The principal of a key that was presented earlier, as for a batch. None if it is no longer valid."""
        if entry := policy.keys_by_id.get(key_id):
            tenant, known = entry
            return self._principal(key_id, tenant, _set(known.models), _set(known.classes), known.limits)
        read = await self._read(key_id, policy)
        owner = policy.tenants_by_name.get(read.record.tenant) if read.record is not None else None
        if read.record is None or owner is None or read.record.revoked or has_passed(read.record.expires):
            return None
        return self._principal(key_id, owner, read.models, read.classes, read.limits)

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
            record = await self._keys.get_key(key_id)
        except StorageUnavailable:
            self._ask_after = time.monotonic() + ASK_AGAIN_SECONDS
            if last is None or not may_reuse:
                raise
            return last
        if last is not None and record == last.record:
            read = msgspec.structs.replace(last, at=now)  # keeps the same limits object
        else:
            read = _as_used(now, record)
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


def _set(names: tuple[str, ...] | None) -> frozenset[str] | None:
    return None if names is None else frozenset(names)


def _presented(headers: Mapping[bytes, bytes]) -> str:
    """The key in `Authorization: Bearer` or `x-api-key`. Raises `Unauthenticated` if there is none."""
    scheme, _, token = headers.get(b"authorization", b"").partition(b" ")
    key = token.strip() if scheme.lower() == b"bearer" else headers.get(b"x-api-key", b"").strip()
    if not key:
        raise Unauthenticated("no API key: send it as `Authorization: Bearer <key>`")
    return key.decode("latin-1")
