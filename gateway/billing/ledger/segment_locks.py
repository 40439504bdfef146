"""Segments are removed when they were compacted, or are too old; never while somebody reads them.

Whoever reads a ledger holds its chains, together with other readers. The locks are the kernel's: they end with their
process.
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
def held(chains: Iterable[Path]) -> Iterator[None]:
    """No segment of these goes meanwhile. In a folder that can not be written to nothing is held, as nothing goes."""
    with contextlib.ExitStack() as locks:
        for chain in chains:
            with contextlib.suppress(PermissionError, FileNotFoundError):
                fcntl.flock(locks.enter_context(_opened(chain)), fcntl.LOCK_SH)
        yield


@contextlib.contextmanager
def removing(chain: Path, *, wait: bool) -> Iterator[bool]:
    """Whether segments may be removed: nobody reads them, and nobody begins to. `wait`: until nobody does."""
    with _opened(chain) as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            yield False
        else:
            yield True


@contextlib.contextmanager
def _opened(chain: Path) -> Iterator[int]:
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
