"""The journal of the diagnosis: summaries of calls, in two bounded files per gateway.

One file is written; the other is the one before it. A row is JSON and describes how a prompt was built, but contains
none of its text (unless the policy sets `diagnosis.content`). A row that an earlier release wrote has no chain. Each
gateway has a folder named after it, so that several may share a data folder.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import msgspec

from gateway.core.bounded_log import BoundedLog, read_rows
from gateway.diagnosis.breaks import PrefixBreak

MAX_FILE_BYTES = 16 * 2**20  # some 4,000 calls of 8k tokens


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
    """Appends rows, in two files of `MAX_FILE_BYTES` (`gateway/core/bounded_log.py`)."""

    def __init__(self, folder: Path, replica: str, *, max_file_bytes: int = MAX_FILE_BYTES) -> None:
        self._log = BoundedLog(folder, replica, what="the diagnosis", max_file_bytes=max_file_bytes)

    @property
    def rows_lost(self) -> int:
        """How many rows the disk rejected."""
        return self._log.rows_lost

    def append(self, row: CallSummary) -> None:
        """Write a row. Never raises."""
        self._log.append(_encode(row))

    def close(self) -> None:
        """Close the file. Safe to call twice; a later row opens it again."""
        self._log.close()


def read_summaries(folder: Path) -> Iterator[CallSummary]:
    """The rows of all gateways below this folder, each gateway's oldest first.

    Malformed lines are skipped, such as the last line of a gateway that was killed.
    """
    for line in read_rows(folder):
        with contextlib.suppress(msgspec.MsgspecError):
            yield _row.decode(line)
