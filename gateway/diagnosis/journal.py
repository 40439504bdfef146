"""The journal of the diagnosis: summaries of calls, in two bounded files per gateway.

One file is written; the other is the one before it. A row is JSON and describes how a prompt was built, but contains
none of its text (unless the policy sets `diagnosis.content`). A row that an earlier release wrote has no chain. Each
gateway has a folder named after it, so that several may share a data folder.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import msgspec

from gateway.diagnosis.breaks import PrefixBreak

MAX_FILE_BYTES = 16 * 2**20  # some 4,000 calls of 8k tokens
CURRENT, EARLIER = "current.jsonl", "earlier.jsonl"

log = logging.getLogger("warmpath")


class PartRow(msgspec.Struct, frozen=True, array_like=True):
    """A part of a prompt: role, length and salted digest."""

    role: str
    tokens: int
    digest: str  # salted: equal only for equal parts of one tenant's prompts


class CallSummary(msgspec.Struct, frozen=True, kw_only=True):
    """One sampled call: a row of the journal. Money is decimal text; None if unknown."""

    time: str  # RFC 3339
    call_id: str
    tenant: str
    key_id: str
    agent: str  # the client program, from its user-agent
    model: str
    deployment: str | None
    sample: Annotated[float, msgspec.Meta(gt=0)]  # the share of conversations that were sampled
    level: str  # the level of canonicalisation
    prompt_tokens: int
    cached_tokens: int
    exact: bool  # the engine counted the tokens
    parts: tuple[PartRow, ...]  # the first `MAX_PART_ROWS`
    parts_in_all: int  # how many parts the prompt has
    broken: PrefixBreak | None
    against: str | None  # the id of the call that it was compared with
    lost_seconds: float | None
    lost_cost: str | None
    currency: str | None
    opt_in: tuple[str, ...] = ()  # the P3 transforms that the policy named
    chain: str = ""  # of the prompt as it was sent (`prompt_chain.py`)
    forms: dict[str, str] = {}  # chains of the forms that it could have (`candidate_forms.py`)
    cache_tokens: int = 0  # capacity of the deployment's cache, as estimated then
    miss_cost: str | None = None  # what a computed token costs more than a cached one


_encode = msgspec.json.encode
_row = msgspec.json.Decoder(CallSummary)


class DiagnosisJournal:
    """Appends rows. If the disk rejects one, the row is lost and counted; the first loss is logged."""

    def __init__(self, folder: Path, replica: str, *, max_file_bytes: int = MAX_FILE_BYTES) -> None:
        self._folder = folder / replica.replace("/", "_")
        self._max_file_bytes = max_file_bytes
        self._file: int | None = None
        self._bytes = 0
        self.rows_lost = 0

    def append(self, row: CallSummary) -> None:
        """Write a row. Never raises."""
        line = _encode(row) + b"\n"
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
                log.warning("cannot write the diagnosis to %s: %s", self._folder, error)
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


def read_summaries(folder: Path) -> Iterator[CallSummary]:
    """The rows of all gateways below this folder, each gateway's oldest first.

    Malformed lines are skipped, such as the last line of a gateway that was killed.
    """
    for replica in sorted(path for path in folder.glob("*") if path.is_dir()):
        for name in (EARLIER, CURRENT):
            with contextlib.suppress(FileNotFoundError), (replica / name).open("rb") as lines:
                for line in lines:
                    with contextlib.suppress(msgspec.MsgspecError):
                        yield _row.decode(line)
