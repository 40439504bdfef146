"""Hash chain of the ledger: the format of rows and folders, and the check that no row was changed.

    <ledger>/<replica>/0000000001.jsonl    a segment of the replica's chain, one JSON object per line:

    {"v":1,"prev":"<hash of the row before>","kind":"receipt", ...,"hash":"<sha256 of this row up to here>"}

The hash is the SHA-256 of every byte before it in the row, `prev` included. A changed row therefore does not match its
own hash. If a row was removed, added or moved, the `prev` of the next row does not match, also between segments. The
first row's `prev` is all zeros. A chain alone cannot show that its end was cut off, or that all of it was rewritten. To
detect that, compare the `heads` that `verify` returns with copies kept outside the ledger.

Each replica has its own chain, because each replica has its own writer. `gateway.billing.ledger.rows` defines the kinds
of rows. Money is decimal text without exponents.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

import msgspec

from gateway.billing.ledger.rows import Row, decode_head, encode
from gateway.billing.ledger.segment_locks import lock_for_reading
from gateway.billing.ledger.unreadable import UnreadableRow, why_unreadable

SCHEMA_VERSION = 1
GENESIS = "0" * 64  # `prev` of a chain's first row
UNCOMPACTED_SEGMENTS = 2  # the newest two: the writer appends to them, and reads them when it opens the chain
_OPENING = f'{{"v":{SCHEMA_VERSION},"prev":"'.encode()
_CLOSING_BYTES = len(b',"hash":""}\n') + 64
_ROW = re.compile(rb'\{"v":(\d+),"prev":"([0-9a-f]{64})",.*,"hash":"([0-9a-f]{64})"\}\n', re.DOTALL)
_SEGMENT = re.compile(r"\d{10}\.(jsonl|parquet)")


class RowError(Exception):
    """The line is not a row, or was changed after it was written. The message says why."""


class UnknownVersion(RowError):
    """The row was written by a newer version of Warmpath."""


class BrokenRow(Exception):
    """The first row of a chain that fails the check: its file, its line number and the reason."""

    def __init__(self, file: Path, line: int, why: str) -> None:
        super().__init__(f"{file}:{line}: {why}")
        self.file = file
        self.line = line
        self.why = why


class Verification(NamedTuple):
    """The result of `verify`: rows checked, the hash of each replica's last good row, and the rows that failed.

    `all_broken` has the first broken row of each chain that has one, and `unreadable` the rows that readers set aside,
    although their chain is intact. `broken` is the first of `all_broken`.
    """

    rows: int
    heads: dict[str, str]
    all_broken: tuple[BrokenRow, ...] = ()
    unreadable: tuple[UnreadableRow, ...] = ()

    @property
    def broken(self) -> BrokenRow | None:
        return self.all_broken[0] if self.all_broken else None


def encode_row(row: Row, prev: str) -> tuple[bytes, str]:
    """Encode a row. Returns its line, newline included, and its hash. `prev` is the hash of the row before it."""
    body = b'%b%b",%b' % (_OPENING, prev.encode(), encode(row)[1:-1])
    digest = sha256(body).hexdigest()
    return b'%b,"hash":"%b"}\n' % (body, digest.encode()), digest


def check_row(line: bytes) -> tuple[str, str]:
    """Return (`prev`, `hash`) of a line that `encode_row` made. Raises `RowError` if the line was changed."""
    if not line.endswith(b"\n"):
        raise RowError("the row is incomplete: writing it was interrupted")
    match = _ROW.fullmatch(line)
    if match is None:
        raise RowError("this is no ledger row")
    if int(match[1]) != SCHEMA_VERSION:
        raise UnknownVersion(
            f"the row has schema version {int(match[1])}; this version of Warmpath reads {SCHEMA_VERSION}"
        )
    prev, digest = match[2].decode(), match[3].decode()
    if sha256(line[:-_CLOSING_BYTES]).hexdigest() != digest:
        raise RowError("the row was changed: its content does not match its hash")
    return prev, digest


def segments(chain: Path) -> list[Path]:
    """List a replica's segment files in order, each a `.jsonl` file or, if compacted, a `.parquet` file.

    While a segment is being compacted, both files may exist. The `.jsonl` file is then returned.
    """
    # In reverse order `.parquet` comes before `.jsonl`, so the `.jsonl` file replaces it in the dict.
    found = sorted((file for file in chain.iterdir() if _SEGMENT.fullmatch(file.name)), reverse=True)
    return [*reversed({file.stem: file for file in found}.values())]


def compactable_segments(chain: Path) -> list[Path]:
    """List the segments that can be compacted: all `.jsonl` files except the newest two."""
    return [file for file in segments(chain) if file.suffix == ".jsonl"][:-UNCOMPACTED_SEGMENTS]


def chains(ledger: Path) -> list[Path]:
    """List the folders of all replicas, sorted by name."""
    return sorted(folder for folder in ledger.iterdir() if folder.is_dir()) if ledger.is_dir() else []


def first_event_id(segment: Path) -> str | None:
    """Return the event id of a segment's first row. None if the first row is unreadable. Raises `OSError`."""
    source = segment if segment.suffix == ".jsonl" else segment.with_suffix(".manifest")
    with source.open("rb") as lines:
        first = lines.readline()
    try:
        return decode_head(first).event_id
    except msgspec.MsgspecError:
        return None


def segment_name(number: int) -> str:
    """Return the name of a segment's `.jsonl` file. Numbers begin at 1."""
    return f"{number:010d}.jsonl"


def _lines(file: Path) -> Iterator[bytes]:
    if file.suffix != ".jsonl":
        raise RowError("the segment is compacted: `warmpath usage verify` can read it")
    with file.open("rb") as lines:
        yield from lines


def verify(ledger: Path, read_lines: Callable[[Path], Iterator[bytes]] = _lines) -> Verification:
    """Check every row of every replica, up to the first broken one of each.

    `read_lines` returns the lines of a segment. It may raise `RowError`.
    """
    rows, heads = 0, dict[str, str]()
    all_broken, unreadable = list[BrokenRow](), list[UnreadableRow]()
    found = chains(ledger)
    with lock_for_reading(found):
        for chain in found:
            try:
                for digest in _walk(chain, read_lines, unreadable):
                    heads[chain.name] = digest
                    rows += 1
            except BrokenRow as broken:
                all_broken.append(broken)
    return Verification(rows, heads, tuple(all_broken), tuple(unreadable))


def _walk(chain: Path, read_lines: Callable[[Path], Iterator[bytes]], unreadable: list[UnreadableRow]) -> Iterator[str]:
    """Check the rows of one chain in order, and yield each row's hash. Raises `BrokenRow` at the first row that fails.

    Appends intact rows that readers set aside to `unreadable`. If the oldest segments were removed, the `prev` of the
    first remaining row is not checked.
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
                if (why := why_unreadable(line)) is not None:
                    unreadable.append(UnreadableRow(file, good, why))
                yield digest
        except RowError as error:
            raise BrokenRow(file, good + 1, str(error)) from error
