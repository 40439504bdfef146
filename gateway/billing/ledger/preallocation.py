"""Room on the disk that is taken before it is needed, behind the end of a file: its size stays as it was.

`posix_fallocate` would make the file longer, and readers would find zeros at its end; so Linux's own `fallocate` with
FALLOC_FL_KEEP_SIZE, see fallocate(2). Where the system or the file system has no such thing, no room can be promised.
"""

from __future__ import annotations

import ctypes
import errno
import os
import sys

_KEEP_SIZE = 1
_NOT_HERE = frozenset({errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL})

_libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


def preallocate(file: int, offset: int, length_bytes: int) -> bool:
    """Whether these bytes belong to the file now. False: that can not be had here. Raises `OSError` on a full disk."""
    if _libc is None:
        return False
    answer = _libc.fallocate(
        ctypes.c_int(file), ctypes.c_int(_KEEP_SIZE), ctypes.c_int64(offset), ctypes.c_int64(length_bytes)
    )
    if answer == 0:
        return True
    error = ctypes.get_errno()
    if error in _NOT_HERE:
        return False
    raise OSError(error, os.strerror(error))


def release_preallocated(file: int) -> None:
    """What is behind the file's end."""
    os.ftruncate(file, os.fstat(file).st_size)
