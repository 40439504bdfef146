"""Preallocates disk space behind the end of a file, without changing its size.

`posix_fallocate` would make the file longer, and readers would find zeros at its end. This module therefore uses
Linux's `fallocate` with FALLOC_FL_KEEP_SIZE, see fallocate(2). Other operating systems and some file systems do not
support it.
"""

from __future__ import annotations

import ctypes
import errno
import os
import sys

_KEEP_SIZE = 1
_UNSUPPORTED = frozenset({errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL})

_libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


def preallocate(file: int, offset: int, length_bytes: int) -> bool:
    """Allocate a range of bytes of a file. Returns False if unsupported. Raises `OSError` if the disk is full."""
    if _libc is None:
        return False
    result = _libc.fallocate(
        ctypes.c_int(file), ctypes.c_int(_KEEP_SIZE), ctypes.c_int64(offset), ctypes.c_int64(length_bytes)
    )
    if result == 0:
        return True
    error = ctypes.get_errno()
    if error in _UNSUPPORTED:
        return False
    raise OSError(error, os.strerror(error))


def release_preallocated(file: int) -> None:
    """Free the disk space that is allocated behind the end of a file."""
    os.ftruncate(file, os.fstat(file).st_size)
