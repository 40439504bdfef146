"""Phase 1: headers -> `Principal`. Keys are kept hashed, and compared in a time that says nothing.

A right key of the policy is known again by a dictionary's hash, which is seeded and tells nothing of where two keys
differ. Any other is looked up by its public id: in the policy first, then in the storage, whose answers are remembered
for `REMEMBER_SECONDS` (absent keys too), so that guessing costs the store nothing and a revocation takes effect soon.

While the storage is away, what was last read of a key still holds for `OUTAGE_SECONDS`, where the policy wants calls to
go on (`storage_outage: {limits: local_share}`). A replica that had not heard of a revocation by then does not, for so
long.
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
ASK_AGAIN_SECONDS = 1.0  # while the storage is away: nobody waits for it between


class _Read(msgspec.Struct, frozen=True):
    """A key's record, as it was read, and what it says in the form in which it is used."""

    at: float
    record: KeyRecord | None
    models: frozenset[str] | None = None
    classes: frozenset[str] | None = None
    limits: Limits | None = None


class Authenticator:
    def __init__(self, keys: KeyStore, pepper: str) -> None:
        self._keys = keys
        self._pepper = pepper
        self._remembered: OrderedDict[str, _Read] = OrderedDict()
        self._policy: Policy | None = None
        self._known: dict[str, Principal] = {}  # of that policy's own keys, as they were presented
        self._principals: dict[str, Principal] = {}  # by the ids of their keys
        self._ask_after = 0.0  # while the storage is away
        self._nobodys_hash = hash_key("nobody", pepper)  # compared with where there is no record, to take as long

    async def authenticate(self, headers: Mapping[bytes, bytes], policy: Policy) -> Principal:
        """Raises `Unauthenticated`, in the same words whether the id or the secret is wrong."""
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
                self._known[key] = principal  # one for each key of the policy, since only the right secret comes here
                return principal
        elif parsed and (read := await self._read(key_id, policy)).record is not None:
            owner = policy.tenants_by_name.get(read.record.tenant)
            if self._opens(key, read.record) and owner is not None:
                return self._principal(key_id, owner, read.models, read.classes, read.limits)
        else:
            verify(key, self._nobodys_hash, self._pepper)
        raise Unauthenticated("the API key is not valid")

    def _principal(
        self, key_id: str, owner: Tenant, models: frozenset[str] | None, classes: frozenset[str] | None,
        limits: Limits | None,
    ) -> Principal:  # fmt: skip
        """Whom a key stands for: the same object until something has changed, by which it is known again."""
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
        """Whom a key stands for that was presented earlier, as for a batch; None where it is valid no more."""
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
        goes_on = policy.storage_outage.limits != "refuse" and last is not None and now - last.at < OUTAGE_SECONDS
        if last is not None and goes_on and now < self._ask_after:
            return last
        try:
            record = await self._keys.get_key(key_id)
        except StorageUnavailable:
            self._ask_after = time.monotonic() + ASK_AGAIN_SECONDS
            if last is None or not goes_on:
                raise
            return last
        if last is not None and record == last.record:
            read = msgspec.structs.replace(last, at=now)  # with the same limits: whoever knows them need not look again
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
    """`Authorization: Bearer` or `x-api-key`."""
    scheme, _, token = headers.get(b"authorization", b"").partition(b" ")
    key = token.strip() if scheme.lower() == b"bearer" else headers.get(b"x-api-key", b"").strip()
    if not key:
        raise Unauthenticated("no API key: send it as `Authorization: Bearer <key>`")
    return key.decode("latin-1")
