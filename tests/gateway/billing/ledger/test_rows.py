"""Rows omit fields with their usual values. Rows of earlier versions contain them, and all readers read both alike."""

from __future__ import annotations

import math
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import duckdb
import msgspec
import pytest

from gateway.billing.ledger.chain import GENESIS, check_row, encode_row, segment_name, verify
from gateway.billing.ledger.compaction import compact, read_lines
from gateway.billing.ledger.focus import focus_rows
from gateway.billing.ledger.openmeter import usage_events
from gateway.billing.ledger.reader import (
    Period,
    bill_rows,
    corrected_receipts,
    latest_receipts,
    summarise,
    unbilled_work,
    write_parquet,
)
from gateway.billing.ledger.rows import (
    USUAL_VALUES,
    Correction,
    Row,
    UnbilledWork,
    complete_receipt,
    decode,
    decode_head,
    encode,
)
from gateway.billing.ledger.spending import spent
from gateway.billing.ledger.stripe import meter_events
from gateway.types import AttemptRow, Receipt
from tests.gateway.billing.ledger.receipts import a_receipt, write_chain

EARLIER = (Path(__file__).parent / "earlier_rows" / "0000000001.jsonl").read_bytes().splitlines(keepends=True)
"""Rows that version 0.1.0 wrote: receipts of all sources, a failover, unbilled work, and a correction."""
ROWS_PER_SEGMENT = 3


def read_everything(ledger: Path, folder: Path) -> list[Any]:
    """What all readers say about a ledger."""
    exported = folder / "export.parquet"
    write_parquet(ledger, exported)
    with duckdb.connect(":memory:") as connection:
        parquet = connection.execute("FROM read_parquet($file)", {"file": str(exported)}).fetchall()
    return [
        summarise(ledger),
        summarise(ledger, by=["tenant", "day", "user", "tier"]),
        summarise(ledger, by=["class", "operation", "outcome", "batch"]),
        summarise(ledger, period=Period(only={"class": ["realtime"], "operation": ["chat/completions"]})),
        latest_receipts(ledger, 20),
        [*bill_rows(ledger)],
        [*corrected_receipts(ledger)],
        [*focus_rows(ledger, provider="us")],
        [*meter_events(ledger, event_name="tokens", customers={"acme": "cus_1", "umbrella": "cus_2"})],
        [*usage_events(ledger, event_type="tokens", source="us", subjects={})],
        unbilled_work(ledger),
        unbilled_work(ledger, Period(only={"class": ["realtime"]})),
        [*spent(ledger)],
        parquet,
    ]


def write_segments(ledger: Path, lines: Sequence[bytes]) -> None:
    """Write a chain of three segments, of which the first can be compacted."""
    (ledger / "replica").mkdir(parents=True)
    for number, start in enumerate(range(0, len(lines), ROWS_PER_SEGMENT), start=1):
        segment = ledger / "replica" / segment_name(number)
        segment.write_bytes(b"".join(lines[start : start + ROWS_PER_SEGMENT]))


def rewritten(first: int, now: int = 0) -> list[bytes]:
    """The chain of the earlier rows, in three forms.

    Those before the index `first` are unchanged. Those before `now` omit most usual values, but have absolute times in
    their attempts. The others are as they are written now.
    """
    lines, head = EARLIER[:first], check_row(EARLIER[first - 1])[1] if first else GENESIS
    for number, line in enumerate(EARLIER[first:], start=first):
        row, head = encode_row(decode(line if number < now else as_written_now(line)), head)
        lines.append(row)
    return lines


def as_written_now(line: bytes) -> bytes:
    """An earlier row without what a receipt or correction omits now."""
    row = msgspec.json.decode(line, type=dict[str, Any])
    if row["kind"] not in ("receipt", "correction"):
        return line
    for attempt in row["attempts"]:
        assert (attempt.pop("started"), attempt.pop("ended")) == (row["started"], "2026-11-20T10:00:01.000001Z")
        attempt.update(after=0.0, seconds=1.0)
    kept = {name: value for name, value in row.items() if name not in USUAL_VALUES or value != USUAL_VALUES[name]}
    return msgspec.json.encode(kept)


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """What all readers say about the earlier rows."""
    folder = tmp_path_factory.mktemp("earlier")
    write_segments(folder, EARLIER)
    return read_everything(folder, folder.parent)


@pytest.mark.parametrize(
    ("first", "now"), [(0, 0), (2, 0), (0, 9), (1, 4)], ids=["all rows", "the later rows", "absolute", "all forms"]
)
def test_every_reader_reads_all_forms_alike(tmp_path: Path, expected: list[Any], first: int, now: int) -> None:
    write_segments(tmp_path / "now", rewritten(first, now))
    assert read_everything(tmp_path / "now", tmp_path) == expected
    assert len(compact(tmp_path / "now", before=math.inf)) == 1
    assert read_everything(tmp_path / "now", tmp_path) == expected
    verified = verify(tmp_path / "now", read_lines)
    assert (verified.rows, verified.broken, verified.unreadable) == (len(EARLIER), None, ())


def test_parquet_of_an_earlier_version_is_read(tmp_path: Path, expected: list[Any]) -> None:
    """Its columns have the values of the earlier lines. Its lines are the proof of them."""
    write_segments(tmp_path / "mixed", rewritten(ROWS_PER_SEGMENT))
    write_segments(tmp_path / "earlier", EARLIER)
    compact(tmp_path / "earlier", before=math.inf)
    for suffix in ("parquet", "manifest"):
        name = f"0000000001.{suffix}"
        shutil.copy(tmp_path / "earlier" / "replica" / name, tmp_path / "mixed" / "replica" / name)
    (tmp_path / "mixed" / "replica" / "0000000001.jsonl").unlink()
    assert read_everything(tmp_path / "mixed", tmp_path) == expected
    assert verify(tmp_path / "mixed", read_lines).broken is None


def test_earlier_rows_are_the_same_rows() -> None:
    for before, absolute, now in zip(EARLIER, rewritten(0, len(EARLIER)), rewritten(0), strict=True):
        assert decode(before) == decode(absolute) and len(now) <= len(absolute) <= len(before)
        earlier, row = (msgspec.json.decode(line, type=dict[str, Any]) for line in (before, now))
        if earlier["kind"] in ("receipt", "correction"):
            assert complete_receipt(row) == {**complete_receipt(earlier), "prev": row["prev"], "hash": row["hash"]}
            assert all(name in earlier for name in USUAL_VALUES)
    assert {decode_head(line).kind for line in EARLIER} == {"receipt", "opened", "unbilled", "correction"}


def test_a_row_has_only_what_its_reader_cannot_know() -> None:
    row = msgspec.json.decode(encode(a_receipt(reasoning=0)), type=dict[str, Any])
    assert not row.keys() & USUAL_VALUES.keys()
    assert row["attempts"][0].keys() == {"after", "seconds", "span_id", "predicted_cached_tokens"}
    unusual = {
        "end_user": "ada", "service_tier": "flex", "exact": False, "cache_write": 1, "reasoning": 2,
        "operation": "embeddings", "latency_class": "batch", "outcome": "client_gone",
    }  # fmt: skip
    failed = AttemptRow("", 0.0, 0.5, 0, "other", "connect_error", None)
    row = msgspec.json.decode(encode(a_receipt(attempts=(failed,), **unusual)), type=dict[str, Any])
    assert unusual.keys() == USUAL_VALUES.keys() and unusual.items() <= row.items()
    assert complete_receipt(row)["attempts"][0]["status"] is None
    assert row["attempts"][0] == {
        "span_id": "", "after": 0.0, "seconds": 0.5, "deployment": "other", "outcome": "connect_error", "status": None
    }  # fmt: skip


def test_the_class_and_outcome_of_unbilled_work_stay_unknown(tmp_path: Path) -> None:
    """They are null if the gateway died. That is not a receipt's usual value."""
    lost = decode(next(line for line in EARLIER if decode_head(line).kind == "unbilled"))
    assert isinstance(lost, UnbilledWork)
    rows: list[Row] = [a_receipt(), msgspec.structs.replace(lost, outcome=None), *(a_receipt() for _ in range(3))]
    write_chain(tmp_path / "replica", rows)
    for _ in range(2):
        (line,) = unbilled_work(tmp_path)
        assert (line.outcome, line.attempts) == (None, 1)
        for dimension in ("class", "operation", "outcome"):
            (sums,) = summarise(tmp_path, by=[dimension])
            usual = sums.group[dimension]
            assert usual and sums.requests == 4
            assert unbilled_work(tmp_path, Period(only={dimension: [usual]})) == []
        assert len(compact(tmp_path, before=math.inf)) in (0, 1)


@pytest.mark.parametrize("kind", [Receipt, Correction])
def test_the_usual_values_are_the_defaults(kind: type[Receipt]) -> None:
    defaults = {each.name: each.default for each in msgspec.structs.fields(kind) if each.name in USUAL_VALUES}
    assert defaults == dict(USUAL_VALUES)
