"""Locks that keep segments from being removed, by compaction or by age, while a process reads them.

Readers of a chain share its lock, and removal takes it exclusively. The locks are `flock(2)` locks of the kernel, so
they end with their process.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

_LOCK = "removing"


@contextlib.contextmanager
def lock_for_reading(chains: Iterable[Path]) -> Iterator[None]:
    """Keep the segments of these chains from being removed. Does nothing in a read-only folder, which needs no lock."""
    with contextlib.ExitStack() as locks:
        for chain in chains:
            with contextlib.suppress(PermissionError, FileNotFoundError):
                fcntl.flock(locks.enter_context(_lock_file(chain)), fcntl.LOCK_SH)
        yield


@contextlib.contextmanager
def lock_for_removal(chain: Path, *, wait: bool) -> Iterator[bool]:
    """Yield whether segments may be removed: no process reads them, or can begin to. `wait`: wait for the readers."""
    with _lock_file(chain) as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            yield False
        else:
            yield True


@contextlib.contextmanager
def _lock_file(chain: Path) -> Iterator[int]:
    try:
        lock = os.open(chain / _LOCK, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        if error.errno == errno.EROFS:
            raise PermissionError(*error.args) from error
        raise
    try:
        yield lock
    finally:
        os.close(lock)
