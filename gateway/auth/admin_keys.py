"""Keys of the admin API with a role, an organisation and an expiry. The storage has hashes only.

The key in the settings (`WARMPATH_ADMIN_KEY`) is an owner's, belongs to no organisation and does not expire. All other
keys have the form `wpa-<id>-<secret>` and are records of the storage, which all gateways follow (`records.py`).
"""

from __future__ import annotations

import hmac
import time
from collections.abc import Callable
from typing import get_args

import msgspec
from pydantic import SecretStr

from gateway.auth.keyring import LIFE_SECONDS_MAX, rfc3339_seconds
from gateway.auth.records import RecordFeed
from gateway.core.api_keys import hash_key, new_id, new_role_key, parse_role_key, verify
from gateway.core.errors import BadRequest, Conflict, NotFound
from gateway.core.times import has_passed
from gateway.policy.sign_in import Role

ADMIN_KEY = "admin_key"  # the kind of these records
MAX_ADMIN_KEYS = 1_000

ROLES: tuple[Role, ...] = get_args(Role)


class Actor(msgspec.Struct, frozen=True):
    """Who uses the admin API: a key or a person. `organisation` is the tenant to which they are restricted.

    The restriction includes that tenant's descendants.
    """

    name: str
    role: Role
    organisation: str | None = None


class AdminKey(msgspec.Struct, frozen=True):
    """A stored admin key. Times are RFC 3339."""

    id: str
    name: str
    role: Role
    organisation: str | None
    hash: str
    created: str
    expires: str | None = None


_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(AdminKey).decode


class AdminKeys:
    """Finds, creates and revokes admin keys. Without a key in the settings, only stored keys are valid."""

    def __init__(
        self, feed: RecordFeed, pepper: str, first: SecretStr | None, *, clock: Callable[[], float] = time.time
    ) -> None:
        self._feed = feed
        self._pepper = pepper
        self._first = None if first is None else first.get_secret_value().encode()
        self._clock = clock
        self._unmatched_hash = hash_key("nobody", pepper)  # compared with keys whose id is unknown

    def authenticate(self, presented: str) -> Actor | None:
        """Return who presents a key, or None if it is not valid."""
        if self._first is not None and hmac.compare_digest(presented.encode("latin-1", "replace"), self._first):
            return Actor("the key in the settings", "owner")
        key_id = parse_role_key(presented)
        record = self._feed.of_kind(ADMIN_KEY).get(key_id) if key_id is not None else None
        if record is None or record.value is None:
            verify(presented, self._unmatched_hash, self._pepper)
            return None
        known = _decode(record.value)
        if not verify(presented, known.hash, self._pepper) or has_passed(known.expires):
            return None
        return Actor(f"{known.name} ({known.id})", known.role, known.organisation)

    async def create(
        self, name: str, role: Role, *, organisation: str | None = None, life_seconds: float | None = None
    ) -> tuple[str, AdminKey]:
        """Create a key. Returns the key itself, which is stored nowhere. Raises `BadRequest` and `Conflict`."""
        if life_seconds is not None and not 0 < life_seconds <= LIFE_SECONDS_MAX:
            raise BadRequest("a key's lifetime must be more than 0 and at most a hundred years", param="expires")
        if role == "owner" and organisation is not None:
            raise BadRequest("an owner belongs to no organisation; use the role admin", param="organisation")
        await self._feed.refresh()
        if len(self._feed.of_kind(ADMIN_KEY)) >= MAX_ADMIN_KEYS:
            raise Conflict(f"there are {MAX_ADMIN_KEYS} admin keys, which is the most")
        key_id = new_id()
        key, now = new_role_key(key_id), self._clock()
        record = AdminKey(
            key_id, name, role, organisation, hash_key(key, self._pepper), rfc3339_seconds(now),
            None if life_seconds is None else rfc3339_seconds(now + life_seconds),
        )  # fmt: skip
        if not await self._feed.change(ADMIN_KEY, key_id, _encode(record).decode()):
            raise Conflict("the key was not created; try again")
        return key, record

    async def revoke(self, key_id: str) -> AdminKey:
        """Revoke a key for good. Raises `NotFound`."""
        await self._feed.refresh()
        record = self._feed.of_kind(ADMIN_KEY).get(key_id)
        if record is None or record.value is None:
            raise NotFound(f"there is no admin key {key_id!r}", param="id")
        await self._feed.change(ADMIN_KEY, key_id, None)
        return _decode(record.value)

    async def all(self) -> list[AdminKey]:
        """Return all keys that are not revoked, sorted by id."""
        await self._feed.refresh()
        records = self._feed.of_kind(ADMIN_KEY)
        return [_decode(record.value or "") for _, record in sorted(records.items())]


def public_form(key: AdminKey) -> dict[str, str | None]:
    """Return a key without its hash, for the admin API and the CLI."""
    return {
        "id": key.id,
        "object": "warmpath.admin_key",
        "name": key.name,
        "role": key.role,
        "organisation": key.organisation,
        "state": "expired" if has_passed(key.expires) else "active",
        "created": key.created,
        "expires": key.expires,
    }
