"""Unpredictable numbers without a system call for each: the kernel is asked for a pool of bytes now and then."""

from __future__ import annotations

import os

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
