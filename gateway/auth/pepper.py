"""Whether all who use one storage have the same pepper. A key that is made with another one is never valid, and nobody
would be told.

Beside the keys, under an id that none can have, the storage keeps a check value of the pepper. Whoever comes first
writes it. It is salted and slow, unlike the hashes of keys: a pepper, which people may have made up, is no easier to
guess from it than from the hash of a key that is known.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import secrets
from datetime import UTC, datetime

from gateway.storage.base import KeyRecord, KeyStore

CHECK_ID = "/pepper"  # no key's: see `gateway.core.api_keys.ID_PATTERN`
SALT_BYTES = 16

_SCHEME = "scrypt"
_COST = {"n": 2**14, "r": 8, "p": 1}  # about 50 ms, and 16 MiB for so long

ANOTHER_PEPPER = "WARMPATH_KEY_PEPPER is not the one that the keys of this storage are made with"


class PepperCheck:
    def __init__(self, keys: KeyStore, pepper: str) -> None:
        self._keys = keys
        self._pepper = pepper

    async def agrees(self) -> bool:
        """Whether it is the storage's; it is from now on where the storage knows of none."""
        kept = await self._keys.get_key(CHECK_ID)
        if kept is None:
            if await self._keys.change_key(await self._record(secrets.token_hex(SALT_BYTES))):
                return True
            kept = await self._keys.get_key(CHECK_ID)  # somebody else was faster
        if kept is None:
            return False
        salt = kept.hash.split(":")[1]
        return hmac.compare_digest(kept.hash, (await self._record(salt)).hash)

    async def take_over(self) -> None:
        """Make it the storage's, whatever was until now."""
        await self._keys.put_key(await self._record(secrets.token_hex(SALT_BYTES)))

    async def _record(self, salt: str) -> KeyRecord:
        created = datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
        return KeyRecord(CHECK_ID, "", await asyncio.to_thread(_hash, self._pepper, salt), created)


def _hash(pepper: str, salt: str) -> str:
    return f"{_SCHEME}:{salt}:{hashlib.scrypt(pepper.encode(), salt=bytes.fromhex(salt), **_COST).hex()}"


__all__ = ["ANOTHER_PEPPER", "CHECK_ID", "PepperCheck"]
