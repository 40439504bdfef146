"""Reads whole numbers from query strings, headers and forms, whatever a client has written there."""

from __future__ import annotations

from gateway.core.errors import BadRequest

MAX_DIGITS = 18  # so that every number fits into 64 bits, for the storage and for `int` itself


def whole_number(text: str, name: str, *, minimum: int, maximum: int) -> int:
    """Return the number that `text` has in plain decimal digits. Raises `BadRequest`, which names the parameter."""
    number = int(text) if text.isascii() and text.isdigit() and len(text) <= MAX_DIGITS else None
    if number is None or not minimum <= number <= maximum:
        raise BadRequest(f"{name}: must be a whole number from {minimum} to {maximum}", param=name)
    return number
