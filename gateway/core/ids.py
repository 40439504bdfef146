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
_DIGITS = bytes(_BASE32[byte & 31].encode()[0] for byte in range(256))  # of a byte, five bits
_RANDOM_CHARACTERS = 16
_COUNTED_CHARACTERS = 4  # of these, the last count
_COUNTER_END = 32**_COUNTED_CHARACTERS
_REUSED_NS = 10_000_000


class _Ulids:
    """Event ids: 48 bits of milliseconds and 80 of chance, in Crockford's base 32 (github.com/ulid/spec).

    Each is greater than the one before, across a clock that steps back as well: of the 80 bits, 60 are drawn anew with
    every reading of the clock that is used, and the others count on from a number that is drawn too. A reading is used
    for `_REUSED_NS`: what is made of it costs more than an id.
    """

    def __init__(self) -> None:
        self._milliseconds = 0
        self._high = ""  # of the time, what stays for a while
        self._read_again_ns = 0
        self._prefix = ""
        self._counter = _COUNTER_END

    def next(self) -> str:
        now_ns = time.time_ns()
        self._counter = counter = self._counter + 1
        if now_ns >= self._read_again_ns or counter >= _COUNTER_END:
            self._read_again_ns = now_ns + _REUSED_NS
            self._begin(max(now_ns // 1_000_000, self._milliseconds + 1))
            counter = self._counter
        return f"{self._prefix}{_PAIRS[counter >> 10]}{_PAIRS[counter & 1023]}"

    def _begin(self, milliseconds: int) -> None:
        if milliseconds >> 20 != self._milliseconds >> 20:  # every quarter of an hour
            self._high = "".join([_PAIRS[milliseconds >> shift & 1023] for shift in (40, 30, 20)])
        self._milliseconds = milliseconds
        drawn = random_bytes(_RANDOM_CHARACTERS - _COUNTED_CHARACTERS + 2)
        low = _PAIRS[milliseconds >> 10 & 1023] + _PAIRS[milliseconds & 1023]
        self._prefix = f"{self._high}{low}{drawn[2:].translate(_DIGITS).decode()}"
        self._counter = int.from_bytes(drawn[:2]) << 3  # below half: room to count


new_event_id = _Ulids().next


def event_seconds(event_id: str) -> float:
    """When an event id was made, in seconds since the epoch. Raises `ValueError` for what is none."""
    milliseconds = 0
    for character in event_id[:-_RANDOM_CHARACTERS]:
        milliseconds = milliseconds << 5 | _BASE32.index(character)
    return milliseconds / 1000
