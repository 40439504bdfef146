"""Makes the files that the gateway writes readable by its own user only: they have prompts, keys' hashes and prices.

`make_new_files_private` covers whatever this process creates, databases, temporary files and exports included.
`restrict` covers what an earlier release, or another umask, has left readable.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

OTHERS = 0o077  # the permissions of the group and of all others


def make_new_files_private() -> None:
    """From now on this process and its children create files with mode 0600 and folders with 0700."""
    os.umask(OTHERS)


def restrict(*paths: Path) -> None:
    """Take all permissions of the group and of others away from these paths, as far as they exist and are this user's.

    A path on a file system without permissions, or of another user, stays as it is.
    """
    for path in paths:
        with contextlib.suppress(OSError):
            mode = path.stat().st_mode
            if mode & OTHERS:
                path.chmod(mode & 0o7777 & ~OTHERS)


__all__ = ["make_new_files_private", "restrict"]
