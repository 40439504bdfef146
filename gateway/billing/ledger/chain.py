"""The form of a row and of a ledger's folder, and the proof that neither was changed.

    <ledger>/<replica>/0000000001.jsonl    the replica's chain, in segments, one JSON object a line:

    {"v":1,"prev":"<hash of the row before>","kind":"receipt", ...,"hash":"<sha256 of this row up to here>"}

The hash covers every byte before it, `prev` included; so a changed row contradicts itself, and a row removed, added
or moved contradicts its neighbour, across segments too. The very first row's `prev` is all zeros. What a chain alone
can not show is that its end was cut off, or that all of it was rewritten: for that, compare the `heads` that
`verify` returns with ones noted elsewhere.

Each replica has a chain of its own, as it has a writer of its own. `ledger.rows` has the kinds of rows. Money
is decimal text without exponents.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

import msgspec

from gateway.billing.ledger.rows import Row, decode_head, encode
from gateway.billing.ledger.segment_locks import held

SCHEMA_VERSION = 1
GENESIS = "0" * 64  # `prev` of the first row of all
UNCOMPACTED_SEGMENTS = 2  # the newest segments: the writer continues them, and reads the last with a row when it opens
_OPENING = f'{{"v":{SCHEMA_VERSION},"prev":"'.encode()
_CLOSING_BYTES = len(b',"hash":""}\n') + 64
_ROW = re.compile(rb'\{"v":(\d+),"prev":"([0-9a-f]{64})",.*,"hash":"([0-9a-f]{64})"\}\n', re.DOTALL)
_SEGMENT = re.compile(r"\d{10}\.(jsonl|parquet)")


class RowError(Exception):
    """A line is not a row as it was written. The message says why."""


class UnknownVersion(RowError):
    """A row that a newer program wrote."""


class BrokenRow(Exception):
    def __init__(self, file: Path, line: int, why: str) -> None:
        super().__init__(f"{file}:{line}: {why}")
        self.file = file
        self.line = line
        self.why = why


class Verification(NamedTuple):
    """`heads` has the hash of the last good row of every replica; `broken` is the first row that is not."""

    rows: int
    heads: dict[str, str]
    broken: BrokenRow | None


def encode_row(row: Row, prev: str) -> tuple[bytes, str]:
    """The row's line, newline included, and its hash."""
    body = b'%b%b",%b' % (_OPENING, prev.encode(), encode(row)[1:-1])
    digest = sha256(body).hexdigest()
    return b'%b,"hash":"%b"}\n' % (body, digest.encode()), digest


def check_row(line: bytes) -> tuple[str, str]:
    """(prev, hash) of a line that was written by `encode_row` and not changed since. Raises `RowError`."""
    if not line.endswith(b"\n"):
        raise RowError("the row has no end: it was cut off while it was written")
    match = _ROW.fullmatch(line)
    if match is None:
        raise RowError("this is not a row of the ledger")
    if int(match[1]) != SCHEMA_VERSION:
        raise UnknownVersion(f"the row has schema version {int(match[1])}; this program knows {SCHEMA_VERSION}")
    prev, digest = match[2].decode(), match[3].decode()
    if sha256(line[:-_CLOSING_BYTES]).hexdigest() != digest:
        raise RowError("the row was changed: its content does not have its hash")
    return prev, digest


def segments(chain: Path) -> list[Path]:
    """A replica's segments, in order, old ones maybe compacted (`ledger.compaction`). Lines win over Parquet
    that is made of them at this moment.
    """
    found = sorted((file for file in chain.iterdir() if _SEGMENT.fullmatch(file.name)), reverse=True)
    return [*reversed({file.stem: file for file in found}.values())]


def compactable_segments(chain: Path) -> list[Path]:
    """Those that can be compacted: lines, but the newest."""
    return [file for file in segments(chain) if file.suffix == ".jsonl"][:-UNCOMPACTED_SEGMENTS]


def chains(ledger: Path) -> list[Path]:
    """The folders of all replicas, by name."""
    return sorted(folder for folder in ledger.iterdir() if folder.is_dir()) if ledger.is_dir() else []


def first_event_id(segment: Path) -> str | None:
    """Of its first row; None while it has none, or one that can not be read. Raises `OSError`."""
    begins = segment if segment.suffix == ".jsonl" else segment.with_suffix(".manifest")
    with begins.open("rb") as lines:
        first = lines.readline()
    try:
        return decode_head(first).event_id
    except msgspec.MsgspecError:
        return None


def segment_name(number: int) -> str:
    return f"{number:010d}.jsonl"


def _lines(file: Path) -> Iterator[bytes]:
    if file.suffix != ".jsonl":
        raise RowError("the segment is compacted: `warmpath usage verify` reads such ones")
    with file.open("rb") as lines:
        yield from lines


def verify(ledger: Path, read_lines: Callable[[Path], Iterator[bytes]] = _lines) -> Verification:
    """Check every row of every replica, up to the first that is broken. `lines_of` a segment may raise `RowError`."""
    rows, heads = 0, dict[str, str]()
    found = chains(ledger)
    try:
        with held(found):
            for chain in found:
                for digest in _walk(chain, read_lines):
                    heads[chain.name] = digest
                    rows += 1
    except BrokenRow as broken:
        return Verification(rows, heads, broken)
    return Verification(rows, heads, None)


def _walk(chain: Path, read_lines: Callable[[Path], Iterator[bytes]]) -> Iterator[str]:
    """The hash of each row that is as it was written and follows the one before it. Raises `BrokenRow` at the first
    that is not.

    Old segments may have been removed, from the oldest on: the first row that is left is taken at its word.
    """
    files = segments(chain)
    first = int(files[0].stem) if files else 1
    head = GENESIS if first == 1 else None
    for number, file in enumerate(files, start=first):
        if int(file.stem) != number:
            raise BrokenRow(chain / segment_name(number), 1, "the segment is missing")
        good = 0
        try:
            for line in read_lines(file):
                prev, digest = check_row(line)
                if head not in (prev, None):
                    raise RowError("rows before this one were removed, added or moved")
                head, good = digest, good + 1
                yield digest
        except RowError as error:
            raise BrokenRow(file, good + 1, str(error)) from error
