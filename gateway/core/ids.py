"""Makes random bytes and event ids (ULIDs) cheaply, since every request needs some.

`random_bytes` reads from a pool that is refilled from the kernel, so most calls make no system call. `new_event_id`
makes ULIDs, which sort by time, and reads the clock only every 10 ms. Neither function is thread-safe. Both are safe
across `fork`.
"""

from __future__ import annotations

import os
import time

POOL_BYTES = 8192


class _RandomPool:
    """Pool of random bytes. Returns no byte twice. A forked process discards its copy of the parent's pool."""

    def __init__(self) -> None:
        self._pool = b""
        self._used = 0
        os.register_at_fork(after_in_child=self._clear)

    def take(self, count: int) -> bytes:
        """`count` random bytes, at most `POOL_BYTES`."""
        end = self._used + count
        if end > len(self._pool):
            self._pool, end = os.urandom(POOL_BYTES), count
        self._used = end
        return self._pool[end - count : end]

    def _clear(self) -> None:
        self._pool, self._used = b"", 0


random_bytes = _RandomPool().take

_BASE32 = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"
_PAIRS = [high + low for high in _BASE32 for low in _BASE32]
_DIGITS = bytes(_BASE32[byte & 31].encode()[0] for byte in range(256))  # a digit for each byte, by its low five bits
_RANDOM_CHARACTERS = 16
_COUNTED_CHARACTERS = 4  # the last of the random characters are a counter
_COUNTER_END = 32**_COUNTED_CHARACTERS
_CLOCK_REUSE_NS = 10_000_000


class _Ulids:
    """Event ids: 48 bits of milliseconds and 80 random bits, in Crockford's base 32 (github.com/ulid/spec).

    Each id is greater than the previous one, even if the clock is set back. At each reading of the clock, 60 of the 80
    bits are newly drawn, and the other 20 become a counter that starts at a random number. A reading of the clock is
    reused for `_CLOCK_REUSE_NS`, since computing the prefix of its time costs more than the rest of an id.
    """

    def __init__(self) -> None:
        self._milliseconds = 0
        self._high = ""  # the time's high characters, which change every 17 minutes
        self._read_again_ns = 0
        self._prefix = ""
        self._counter = _COUNTER_END

    def next(self) -> str:
        now_ns = time.time_ns()
        self._counter = counter = self._counter + 1
        if now_ns >= self._read_again_ns or counter >= _COUNTER_END:
            self._read_again_ns = now_ns + _CLOCK_REUSE_NS
            now, after = now_ns // 1_000_000, self._milliseconds + 1
            self._begin(now if now > after else after)
            counter = self._counter
        return f"{self._prefix}{_PAIRS[counter >> 10]}{_PAIRS[counter & 1023]}"

    def _begin(self, milliseconds: int) -> None:
        if milliseconds >> 20 != self._milliseconds >> 20:
            self._high = "".join([_PAIRS[milliseconds >> shift & 1023] for shift in (40, 30, 20)])
        self._milliseconds = milliseconds
        drawn = random_bytes(_RANDOM_CHARACTERS - _COUNTED_CHARACTERS + 2)
        low = _PAIRS[milliseconds >> 10 & 1023] + _PAIRS[milliseconds & 1023]
        self._prefix = f"{self._high}{low}{drawn[2:].translate(_DIGITS).decode()}"
        self._counter = int.from_bytes(drawn[:2]) << 3  # starts below half, which leaves room to count


new_event_id = _Ulids().next


def event_seconds(event_id: str) -> float:
    """When an event id was made, in seconds since the epoch. Raises `ValueError` if the id has an invalid digit."""
    milliseconds = 0
    for character in event_id[:-_RANDOM_CHARACTERS]:
        milliseconds = milliseconds << 5 | _BASE32.index(character)
    return milliseconds / 1000
