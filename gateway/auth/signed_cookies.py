"""Values in cookies, signed and bounded in time. Everyone can read one; only who has the secret can make or change it.

    base64url([expiry in seconds, value]) . base64url(HMAC-SHA256(secret, purpose + that text))

A value that was signed for one purpose is not accepted for another.
"""

from __future__ import annotations

import base64
import binascii
import hmac
import time
from collections.abc import Callable
from typing import TypeVar

import msgspec

MAX_CHARACTERS = 4_000  # browsers do not store longer cookies

Value = TypeVar("Value", bound=msgspec.Struct)


class CookieSigner:
    """Signs values for cookies. All workers and gateways with the same secret accept each other's."""

    def __init__(self, secret: bytes, *, clock: Callable[[], float] = time.time) -> None:
        self._secret = secret
        self._clock = clock

    def sign(self, purpose: str, value: msgspec.Struct, *, life_seconds: float) -> str:
        """Return the text of a cookie. Raises `ValueError` if it would be too long."""
        content = _to_text(msgspec.json.encode((self._clock() + life_seconds, value)))
        text = f"{content}.{self._signature(purpose, content)}"
        if len(text) > MAX_CHARACTERS:
            raise ValueError(f"a cookie of {len(text)} characters is too long")
        return text

    def read(self, purpose: str, text: str, form: type[Value]) -> Value | None:
        """Return the value of a cookie. None if it was not signed for this purpose, was changed, or has expired."""
        content, _, signature = text.partition(".")
        if len(text) > MAX_CHARACTERS or not text.isascii():
            return None
        if not hmac.compare_digest(signature, self._signature(purpose, content)):
            return None
        try:
            expires, value = msgspec.json.decode(_from_text(content), type=tuple[float, form])  # type: ignore[valid-type]
        except (msgspec.MsgspecError, binascii.Error):  # signed by another version of Warmpath
            return None
        return value if self._clock() < expires else None

    def _signature(self, purpose: str, content: str) -> str:
        return _to_text(hmac.digest(self._secret, f"{purpose}\n{content}".encode(), "sha256"))


def _to_text(value: bytes) -> str:
    return base64.urlsafe_b64encode(value).rstrip(b"=").decode()


def _from_text(text: str) -> bytes:
    return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
