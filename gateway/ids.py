"""Ids, of unpredictable bytes without a system call for each: the kernel is asked for a pool of bytes now and then."""

from __future__ import annotations

import os
import time

POOL_BYTES = 8192


class _Entropy:
    """Never gives a byte twice. A forked process must not use what its parent's pool still holds."""

    def __init__(self) -> None:
        self._pool = b""
        self._used = 0
        os.register_at_fork(after_in_child=self._forget)

    def take(self, count: int) -> bytes:
        """`count` random bytes, at most `POOL_BYTES`."""
        end = self._used + count
        if end > len(self._pool):
            self._pool, end = os.urandom(POOL_BYTES), count
        self._used = end
        return self._pool[end - count : end]

    def _forget(self) -> None:
        self._pool, self._used = b"", 0


random_bytes = _Entropy().take

_BASE32 = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"
_PAIRS = [high + low for high in _BASE32 for low in _BASE32]
_RANDOM_BITS = 80
_RANDOM_CHARACTERS = _RANDOM_BITS // 5


class _Ulids:
    """Event ids: 48 bits of milliseconds and 80 random ones, in Crockford's base 32 (github.com/ulid/spec).

    Each is greater than the one before, within a millisecond and across a clock that steps back.
    """

    def __init__(self) -> None:
        self._last = 0

    def next(self) -> str:
        random = int.from_bytes(random_bytes(_RANDOM_BITS // 8))
        self._last = max(self._last + 1, time.time_ns() // 1_000_000 << _RANDOM_BITS | random)
        return "".join([_PAIRS[self._last >> shift & 1023] for shift in range(120, -1, -10)])


new_event_id = _Ulids().next


def event_seconds(event_id: str) -> float:
    """When an event id was made, in seconds since the epoch. Raises `ValueError` for what is none."""
    milliseconds = 0
    for character in event_id[:-_RANDOM_CHARACTERS]:
        milliseconds = milliseconds << 5 | _BASE32.index(character)
    return milliseconds / 1000
