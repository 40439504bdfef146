"""A log of JSON rows in two bounded files: one is written, the other is the one before it.

Each gateway has a folder named after it, so that several may share a data folder. If the disk rejects a row, the row is
lost and counted; the first loss is logged.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from pathlib import Path

CURRENT, EARLIER = "current.jsonl", "earlier.jsonl"

log = logging.getLogger("warmpath")


class BoundedLog:
    """Appends rows. Owned by the event loop; a row is one small write."""

    def __init__(self, folder: Path, replica: str, *, what: str, max_file_bytes: int) -> None:
        """`what` names the log in messages. Both files together have up to `2 * max_file_bytes`."""
        self._folder = folder / replica.replace("/", "_")
        self._what = what
        self._max_file_bytes = max_file_bytes
        self._file: int | None = None
        self._bytes = 0
        self.rows_lost = 0

    def append(self, row: bytes) -> None:
        """Write a row, which must not contain a line end. Never raises."""
        line = row + b"\n"
        try:
            if self._file is None:
                self._open()
            elif self._bytes + len(line) > self._max_file_bytes:
                self.close()
                (self._folder / CURRENT).replace(self._folder / EARLIER)
                self._open()
            assert self._file is not None
            self._bytes += os.write(self._file, line)
        except OSError as error:
            if not self.rows_lost:
                log.warning("cannot write %s to %s: %s", self._what, self._folder, error)
            self.rows_lost += 1
            self.close()

    def _open(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        self._file = os.open(self._folder / CURRENT, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._bytes = os.fstat(self._file).st_size
        if self._bytes:  # the process that wrote it may have been killed within a row
            self._bytes += os.write(self._file, b"\n")

    def close(self) -> None:
        """Close the file. Safe to call twice; a later row opens it again."""
        if self._file is not None:
            with contextlib.suppress(OSError):
                os.close(self._file)
            self._file = None


def read_rows(folder: Path) -> Iterator[bytes]:
    """The lines of all gateways' logs in this folder, the oldest of each gateway first. A line may be cut or empty."""
    for replica in sorted(path for path in folder.glob("*") if path.is_dir()):
        for name in (EARLIER, CURRENT):
            with contextlib.suppress(FileNotFoundError), (replica / name).open("rb") as lines:
                yield from lines
