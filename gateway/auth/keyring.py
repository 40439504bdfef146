"""Creates, rotates and revokes the keys in the storage, for `warmpath keys` and the admin API.

Changes of a key are atomic (compare and swap): a key is written only if it has not changed since it was read.
Concurrent changes therefore never undo each other. For example, a key that is revoked while it is rotated
stays revoked.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from datetime import UTC, datetime
from typing import Any

import msgspec

from gateway.auth.pepper import ANOTHER_PEPPER, CHECK_ID, PepperCheck
from gateway.core.api_keys import hash_key, new_id, new_key
from gateway.core.errors import BadRequest, Conflict, NotFound
from gateway.core.times import has_passed
from gateway.policy import Limits, Policy, choices
from gateway.storage.base import KeyRecord, KeyStore

OVERLAP_SECONDS = 86_400.0  # how long a rotated key's old secret stays valid by default
OVERLAP_SECONDS_MAX = 30 * 86_400.0
LIFE_SECONDS_MAX = 100 * 365 * 86_400.0
CHANGE_ATTEMPTS = 5  # how often a change is tried if other processes change the key at the same time


class Keyring:
    """Creates and changes the keys in one storage. Several processes may do so at the same time."""

    def __init__(self, keys: KeyStore, pepper: str, *, clock: Callable[[], float] = time.time) -> None:
        self._keys = keys
        self._pepper = pepper
        self._pepper_check = PepperCheck(keys, pepper)
        self._clock = clock

    async def create(
        self,
        tenant: str,
        *,
        key_id: str | None = None,
        life_seconds: float | None = None,
        models: Collection[str] | None = None,
        classes: Collection[str] | None = None,
        limits: Limits | None = None,
    ) -> tuple[str, KeyRecord]:
        """Create a key. Returns the key itself, which is stored nowhere, and its record.

        Raises `BadRequest`, or `Conflict` if the id is taken or the pepper is not the storage's.
        """
        if life_seconds is not None and not 0 < life_seconds <= LIFE_SECONDS_MAX:
            raise BadRequest("a key's lifetime must be more than 0 and at most a hundred years", param="expires")
        key_id = key_id or new_id()
        try:
            key = new_key(key_id)
        except ValueError as error:
            raise BadRequest(str(error), param="id") from None
        await self._check_pepper()
        now = self._clock()
        record = KeyRecord(
            id=key_id,
            tenant=tenant,
            hash=hash_key(key, self._pepper),
            created=rfc3339_seconds(now),
            expires=None if life_seconds is None else rfc3339_seconds(now + life_seconds),
            models=None if models is None else tuple(models),
            classes=None if classes is None else tuple(classes),
            limits=None if limits is None else limits.model_dump(mode="json", by_alias=True, exclude_none=True),
        )
        if not await self._keys.change_key(record):
            raise Conflict(f"the key {key_id!r} exists already; revoked keys keep their ids", param="id")
        return key, record

    async def rotate(self, key_id: str, *, overlap_seconds: float = OVERLAP_SECONDS) -> tuple[str, KeyRecord]:
        """Give a key a new secret. The current secret stays valid for `overlap_seconds`; an earlier one does not.

        Raises `NotFound`, `BadRequest`, or `Conflict` if the key is revoked or the pepper is not the storage's.
        """
        if not 0 <= overlap_seconds <= OVERLAP_SECONDS_MAX:
            most = f"{OVERLAP_SECONDS_MAX / 86_400:g} days"
            raise BadRequest(f"the old secret may stay valid for at most {most}", param="overlap")
        await self.get(key_id)
        await self._check_pepper()
        key = new_key(key_id)

        def rotated(record: KeyRecord) -> KeyRecord:
            if record.revoked:
                raise Conflict(f"the key {key_id!r} is revoked; create a new one", param="id")
            now = self._clock()
            changes = {
                "hash": hash_key(key, self._pepper), "old_hash": record.hash, "rotated": rfc3339_seconds(now),
                "old_expires": rfc3339_seconds(now + overlap_seconds),
            }  # fmt: skip
            return msgspec.structs.replace(record, **changes)

        return key, await self._change(key_id, rotated)

    async def revoke(self, key_id: str) -> KeyRecord:
        """Revoke a key for good, including its old secret. Raises `NotFound`."""
        return await self._change(
            key_id, lambda record: msgspec.structs.replace(record, revoked=True, old_hash=None, old_expires=None)
        )

    async def get(self, key_id: str) -> KeyRecord:
        """The record of one key. Raises `NotFound`."""
        record = await self._keys.get_key(key_id) if key_id != CHECK_ID else None
        if record is None:
            known = [each.id for each in await self.all()]
            raise NotFound(f"there is no key {key_id!r} in the storage; {choices(key_id, known)}", param="id")
        return record

    async def all(self) -> list[KeyRecord]:
        """The records of all keys, revoked and expired ones included."""
        return [record for record in await self._keys.list_keys() if record.id != CHECK_ID]

    async def change_pepper(self) -> bool:
        """Create keys with this pepper from now on. False if the storage has this pepper already."""
        if await self._pepper_check.agrees():
            return False
        await self._pepper_check.take_over()
        return True

    async def _check_pepper(self) -> None:
        if not await self._pepper_check.agrees():
            raise Conflict(
                f"{ANOTHER_PEPPER}: a key created now would never be valid. Set it to the gateways' value; "
                "to change it for good, see `warmpath keys change-pepper --help`"
            )

    async def _change(self, key_id: str, change: Callable[[KeyRecord], KeyRecord]) -> KeyRecord:
        for _ in range(CHANGE_ATTEMPTS):
            kept = await self.get(key_id)
            changed = msgspec.structs.replace(change(kept), revision=kept.revision + 1)
            if await self._keys.change_key(changed):
                return changed
        raise Conflict(f"the key {key_id!r} is being changed by another process; try again", param="id")


def must_fit(
    policy: Policy,
    tenant: str,
    models: Collection[str] | None = None,
    classes: Collection[str] | None = None,
    limits: Limits | None = None,
    *,
    stored_tenants: Collection[str] = (),
) -> None:
    """Check a key against the policy. Raises `BadRequest` for an unknown name, or a budget with several currencies."""
    for param, what, names, known in (
        ("tenant", "tenant", [tenant] if tenant not in stored_tenants else [], policy.tenants_by_name),
        ("models", "model", models or (), policy.models_by_name),
        ("classes", "class", classes or (), policy.classes),
    ):
        for name in names:
            if name not in known and not (what == "model" and policy.find_model(name) is not None):
                raise BadRequest(
                    f"there is no {what} {name!r} in the policy; {choices(name, list(known))}", param=param
                )
    if limits is not None and limits.budget and len(policy.currencies) > 1:
        message = f"a budget needs all prices in one currency; there are {' and '.join(policy.currencies)}"
        raise BadRequest(message, param="limits.budget")


def state_of(record: KeyRecord) -> str:
    """ "active", "expired" or "revoked"."""
    if record.revoked:
        return "revoked"
    return "expired" if has_passed(record.expires) else "active"


def public_form(record: KeyRecord) -> dict[str, Any]:
    """Return a key's record without its hashes, for the admin API and the CLI."""
    return {
        "id": record.id,
        "object": "warmpath.key",
        "tenant": record.tenant,
        "state": state_of(record),
        "created": record.created,
        "expires": record.expires,
        "models": record.models,
        "classes": record.classes,
        "limits": record.limits,
        "old_secret_expires": record.old_expires,
        "secret_created": record.secret_created,
    }


def is_rotation_due(record: KeyRecord, before: str) -> bool:
    """Whether a key is active and its secret was made before a time (RFC 3339, UTC, to the second)."""
    return state_of(record) == "active" and record.secret_created < before


def rfc3339_seconds(time: float) -> str:
    """Format seconds since the epoch as RFC 3339, to the second."""
    return datetime.fromtimestamp(time, UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
