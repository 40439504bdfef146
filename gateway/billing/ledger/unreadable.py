"""Unreadable rows of the ledger: rows that cannot be summed or billed. Readers set them aside, name them, and continue.

A row is unreadable if it is not JSON, or if a field does not fit the column that it belongs to: a token count above
2**53 - 1, a cost that is no decimal, a time that is no time. A damaged disk or an earlier version may have written it.
One such row must not make the rest of the ledger unreadable. Whether a row was changed is another question, which the
hash chain answers (`gateway.billing.ledger.chain`).
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from gateway.core.times import rfc3339_to_ns

TOKENS_MAX = 2**53 - 1  # of one kind in a row; corrections may be as far below zero
COST_MAX = Decimal(10) ** 18  # of a row, in any currency; a hundred thousand such rows can still be summed
PRICE_MAX = Decimal(10) ** 9  # per million tokens
LISTED_MAX = 10  # rows that a message names; it counts the others

log = logging.getLogger(__name__)


class UnreadableRow(NamedTuple):
    """A row that was set aside: its file, its line number (from 1) and the reason."""

    file: Path
    line: int
    why: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.why}"


class _Checked(msgspec.Struct):
    """The fields of receipts, corrections and unbilled work that readers compute with."""

    kind: str
    started: str = "1970-01-01T00:00:00Z"
    finished: str = "1970-01-01T00:00:00Z"
    exact: bool | None = None
    ttft_seconds: float | None = None
    input_uncached: int = 0
    cache_read: int = 0
    cache_write: int = 0
    cache_write_1h: int = 0
    output: int = 0
    reasoning: int = 0
    audio_input: int = 0
    audio_output: int = 0
    remainder: int = 0
    cost: str | None = None
    price_input: str | None = None
    price_cached_input: str | None = None


_TOKENS = (
    "input_uncached", "cache_read", "cache_write", "cache_write_1h", "output", "reasoning", "audio_input",
    "audio_output", "remainder",
)  # fmt: skip
_DECIMALS = (("cost", COST_MAX), ("price_input", PRICE_MAX), ("price_cached_input", PRICE_MAX))
_decode: Any = msgspec.json.Decoder(_Checked).decode


def why_unreadable(line: bytes) -> str | None:
    """Say why a line of a segment is unreadable. Returns None if it is readable, whatever its kind."""
    try:
        line.decode()
        row = _decode(line)
        for name in _TOKENS:
            if not -TOKENS_MAX <= getattr(row, name) <= TOKENS_MAX:
                return f"{name} is {getattr(row, name)}"
        for name, limit in _DECIMALS:
            text = getattr(row, name)
            if text is not None and not abs(Decimal(text)) < limit:
                return f"{name} is {text[:40]!r}"
        rfc3339_to_ns(row.started)
        rfc3339_to_ns(row.finished)
    except (msgspec.MsgspecError, InvalidOperation, ValueError, OverflowError, RecursionError) as error:
        return f"{type(error).__name__}: {str(error)[:200]}"
    return None


def find_unreadable(file: Path) -> list[UnreadableRow]:
    """Return the unreadable rows of a `.jsonl` segment."""
    with file.open("rb") as lines:
        numbered = enumerate(lines, start=1)
        return [UnreadableRow(file, number, why) for number, line in numbered if (why := why_unreadable(line))]


def warn_of_unreadable(rows: Iterable[UnreadableRow], logger: logging.Logger = log) -> None:
    """Log the rows that were set aside: the first ones by file and line, and how many there are."""
    found = list(rows)
    for row in found[:LISTED_MAX]:
        logger.warning("unreadable ledger row set aside: %s", row)
    if len(found) > LISTED_MAX:
        logger.warning("%d unreadable ledger rows set aside in all", len(found))
