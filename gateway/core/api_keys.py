"""API keys: `wp-<id>-<secret>`. The id is public and finds the record; the secret is known to its holder alone.

What is stored is an HMAC of the whole key. A plain fast hash is enough, and a slow one would only burden every
request: the secret has 256 random bits, so that there is nothing to guess. The pepper, kept outside of the storage,
makes stolen records useless for checking guesses at keys that people made up themselves.
"""

from __future__ import annotations

import hmac
import re
import secrets
from functools import lru_cache

SECRET_BYTES = 32
ID_PATTERN = r"[a-z0-9][a-z0-9_]{0,62}"  # no dash: it ends the id

REMEMBERED_HASHES = 10_000  # of keys that were presented, right or wrong: the same few come again and again

_MAX_KEY_CHARACTERS = 256
_KEY = re.compile(rf"wp-({ID_PATTERN})-([A-Za-z0-9_-]+)", re.ASCII)
_SCHEME = "hmac-sha256:"


def new_id() -> str:
    return secrets.token_hex(4)


def new_key(key_id: str) -> str:
    """Raises `ValueError` where the id is none."""
    if re.fullmatch(ID_PATTERN, key_id) is None:
        raise ValueError("a key id is 1 to 63 of a-z, 0-9 and _, and does not begin with _")
    return f"wp-{key_id}-{secrets.token_hex(SECRET_BYTES)}"


def new_admin_key() -> str:
    """Of the admin API, which has one key and knows it whole."""
    return f"wpa-{secrets.token_hex(SECRET_BYTES)}"


def parse_key(text: str) -> tuple[str, str] | None:
    """(id, secret), or None where the text is no key."""
    if len(text) > _MAX_KEY_CHARACTERS:
        return None
    match = _KEY.fullmatch(text)
    return (match[1], match[2]) if match else None


@lru_cache(maxsize=REMEMBERED_HASHES)
def hash_key(key: str, pepper: str) -> str:
    return _SCHEME + hmac.digest(pepper.encode(), key.encode(), "sha256").hex()


def verify(key: str, hash: str, pepper: str) -> bool:
    """In a time that does not depend on where the two differ."""
    return hmac.compare_digest(hash_key(key, pepper).encode(), hash.encode())


__all__ = ["ID_PATTERN", "hash_key", "new_admin_key", "new_id", "new_key", "parse_key", "verify"]
