"""Phase 1: headers -> `Principal`. Keys are kept hashed, and compared in a time that says nothing.

A key is looked up by its public id: in the policy first, then in the storage, whose answers are remembered for
`REMEMBER_SECONDS` (absent keys too), so that guessing costs the store nothing and a revocation takes effect soon.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Mapping
from datetime import UTC, datetime

from gateway.errors import Unauthenticated
from gateway.keys import hash_key, parse_key, verify
from gateway.policy import Policy
from gateway.storage.base import KeyRecord, Keys
from gateway.types import Principal

REMEMBER_SECONDS = 1.0
REMEMBERED_KEYS_MAX = 10_000


class Authenticator:
    def __init__(self, keys: Keys, pepper: str) -> None:
        self._keys = keys
        self._pepper = pepper
        self._remembered: OrderedDict[str, tuple[float, KeyRecord | None]] = OrderedDict()
        self._nobodys_hash = hash_key("nobody", pepper)  # compared with where there is no record, to take as long

    async def authenticate(self, headers: Mapping[bytes, bytes], policy: Policy) -> Principal:
        """Raises `Unauthenticated`, in the same words whether the id or the secret is wrong."""
        key = _presented(headers)
        parsed = parse_key(key)
        key_id = parsed[0] if parsed else ""
        if entry := policy.keys_by_id.get(key_id):
            tenant, known = entry
            if verify(key, known.hash, self._pepper):
                return Principal(tenant, key_id, frozenset(known.models) if known.models is not None else None)
        elif parsed and (record := await self._record(key_id)):
            owner = policy.tenants_by_name.get(record.tenant)
            if verify(key, record.hash, self._pepper) and _valid(record) and owner is not None:
                return Principal(owner, key_id, frozenset(record.models) if record.models is not None else None)
        else:
            verify(key, self._nobodys_hash, self._pepper)
        raise Unauthenticated("the API key is not valid")

    async def principal_of(self, key_id: str, policy: Policy) -> Principal | None:
        """Whom a key that was verified earlier stands for now; None where it is not valid any more."""
        if entry := policy.keys_by_id.get(key_id):
            tenant, known = entry
            return Principal(tenant, key_id, frozenset(known.models) if known.models is not None else None)
        record = await self._record(key_id)
        owner = policy.tenants_by_name.get(record.tenant) if record is not None else None
        if record is None or owner is None or not _valid(record):
            return None
        return Principal(owner, key_id, frozenset(record.models) if record.models is not None else None)

    async def _record(self, key_id: str) -> KeyRecord | None:
        now = time.monotonic()
        remembered = self._remembered.get(key_id)
        if remembered is not None and now - remembered[0] < REMEMBER_SECONDS:
            return remembered[1]
        record = await self._keys.get_key(key_id)
        self._remembered[key_id] = (now, record)
        self._remembered.move_to_end(key_id)
        if len(self._remembered) > REMEMBERED_KEYS_MAX:
            self._remembered.popitem(last=False)
        return record


def _presented(headers: Mapping[bytes, bytes]) -> str:
    """`Authorization: Bearer` or `x-api-key`."""
    scheme, _, token = headers.get(b"authorization", b"").partition(b" ")
    key = token.strip() if scheme.lower() == b"bearer" else headers.get(b"x-api-key", b"").strip()
    if not key:
        raise Unauthenticated("no API key: send it as `Authorization: Bearer <key>`")
    return key.decode("latin-1")


def _valid(record: KeyRecord) -> bool:
    expired = record.expires is not None and datetime.fromisoformat(record.expires) <= datetime.now(UTC)
    return not (record.revoked or expired)
