"""Checks that all processes on one storage use the same pepper. A key created with another pepper would never be valid.

The storage contains a check value of the pepper beside the keys, under an id that no key can have. The first process
writes the check value. Unlike the hashes of keys, the check value is a salted, slow hash. Someone may have invented the
pepper, and the check value must not make guessing it easier than the hash of a known key does.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import secrets
from datetime import UTC, datetime

from gateway.storage.base import KeyRecord, KeyStore

CHECK_ID = "/pepper"  # no key can have this id: see `gateway.core.api_keys.ID_PATTERN`
SALT_BYTES = 16

_SCHEME = "scrypt"
_COST = {"n": 2**14, "r": 8, "p": 1}  # about 50 ms and 16 MiB per check

ANOTHER_PEPPER = "WARMPATH_KEY_PEPPER differs from the one that this storage's keys were created with"


class PepperCheck:
    """Compares this process's pepper with the pepper that the storage's keys were created with."""

    def __init__(self, keys: KeyStore, pepper: str) -> None:
        self._keys = keys
        self._pepper = pepper

    async def agrees(self) -> bool:
        """Return whether the pepper is the storage's. If the storage has no check value, writes this pepper's."""
        kept = await self._keys.get_key(CHECK_ID)
        if kept is None:
            if await self._keys.change_key(await self._record(secrets.token_hex(SALT_BYTES))):
                return True
            kept = await self._keys.get_key(CHECK_ID)  # another process was faster
        if kept is None:
            return False
        salt = kept.hash.split(":")[1]
        return hmac.compare_digest(kept.hash, (await self._record(salt)).hash)

    async def take_over(self) -> None:
        """Replace the storage's check value with this pepper's."""
        await self._keys.put_key(await self._record(secrets.token_hex(SALT_BYTES)))

    async def _record(self, salt: str) -> KeyRecord:
        created = datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
        return KeyRecord(CHECK_ID, "", await asyncio.to_thread(_hash, self._pepper, salt), created)


def _hash(pepper: str, salt: str) -> str:
    return f"{_SCHEME}:{salt}:{hashlib.scrypt(pepper.encode(), salt=bytes.fromhex(salt), **_COST).hex()}"


__all__ = ["ANOTHER_PEPPER", "CHECK_ID", "PepperCheck"]
