"""Locks that prevent compaction and retention from removing a ledger segment while a process reads it.

Readers of a chain take its lock as a shared lock. Removal takes it as an exclusive lock. The locks are `flock(2)` locks
of the kernel, which are released when their process ends.
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
    """Prevent removal of these chains' segments. A read-only folder is not locked, since nothing can be removed."""
    with contextlib.ExitStack() as locks:
        for chain in chains:
            with contextlib.suppress(PermissionError, FileNotFoundError):
                fcntl.flock(locks.enter_context(_lock_file(chain)), fcntl.LOCK_SH)
        yield


@contextlib.contextmanager
def lock_for_removal(chain: Path, *, wait: bool) -> Iterator[bool]:
    """Yield True if segments may be removed: no process reads them, and none can begin to. False otherwise.

    If `wait` is true, first waits until the readers have finished.
    """
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
        lock = os.open(chain / _LOCK, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno == errno.EROFS:
            raise PermissionError(*error.args) from error
        raise
    try:
        yield lock
    finally:
        os.close(lock)
