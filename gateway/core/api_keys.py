"""API keys: the format `wp-<id>-<secret>`, and the hash that is stored instead of a key.

The id is public and selects the key's record. The secret is known only to the key's owner. Only an HMAC of the complete
key is stored. A fast hash is enough, since a secret has 256 random bits and cannot be guessed. A slow hash would only
add CPU time to every request. Keys that people invent themselves have less entropy. A pepper protects them: it is not
in the storage, so stolen records cannot be used to test guesses.
"""

from __future__ import annotations

import hmac
import re
import secrets

SECRET_BYTES = 32
ID_PATTERN = r"[a-z0-9][a-z0-9_]{0,62}"  # no dash: it ends the id

MAX_KEY_CHARACTERS = 256  # a longer text is no key, and its hash is not computed
_KEY = re.compile(rf"wp-({ID_PATTERN})-([A-Za-z0-9_-]+)", re.ASCII)
_ROLE_KEY = re.compile(rf"wpa-({ID_PATTERN})-([A-Za-z0-9_-]+)", re.ASCII)
_SCHEME = "hmac-sha256:"


def new_id() -> str:
    """A random key id: 8 hex digits."""
    return secrets.token_hex(4)


def new_key(key_id: str) -> str:
    """A new API key with a random secret. Raises `ValueError` if `key_id` is not a valid id."""
    if re.fullmatch(ID_PATTERN, key_id) is None:
        raise ValueError("a key id has 1 to 63 characters of a-z, 0-9 and _, and does not begin with _")
    return f"wp-{key_id}-{secrets.token_hex(SECRET_BYTES)}"


def new_admin_key() -> str:
    """A new key for the settings of the admin API. There is only one, so the key contains no id."""
    return f"wpa-{secrets.token_hex(SECRET_BYTES)}"


def new_role_key(key_id: str) -> str:
    """A new key of the admin API that has a role: `wpa-<id>-<secret>`."""
    return f"wpa-{key_id}-{secrets.token_hex(SECRET_BYTES)}"


def parse_role_key(text: str) -> str | None:
    """The id in a key of the admin API that has a role. None if the text does not have the form of such a key."""
    match = _ROLE_KEY.fullmatch(text) if len(text) <= MAX_KEY_CHARACTERS else None
    return match[1] if match else None


def parse_key(text: str) -> tuple[str, str] | None:
    """Split a key into (id, secret). None if the text does not have the form of a key."""
    if len(text) > MAX_KEY_CHARACTERS:
        return None
    match = _KEY.fullmatch(text)
    return (match[1], match[2]) if match else None


def hash_key(key: str, pepper: str) -> str:
    """The stored form of a key: `hmac-sha256:` and 64 hex digits."""
    return _SCHEME + hmac.digest(pepper.encode(), key.encode(), "sha256").hex()


def verify(key: str, hash: str, pepper: str) -> bool:
    """True if `hash` is the hash of `key`. Compares in constant time."""
    return hmac.compare_digest(hash_key(key, pepper).encode(), hash.encode())


__all__ = [
    "ID_PATTERN",
    "MAX_KEY_CHARACTERS",
    "hash_key",
    "new_admin_key",
    "new_id",
    "new_key",
    "new_role_key",
    "parse_key",
    "parse_role_key",
    "verify",
]
