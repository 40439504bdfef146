"""Every changed byte, and every row removed, added or moved, is detected."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from gateway.billing.ledger import verify
from gateway.billing.ledger.chain import GENESIS, RowError, UnknownVersion, check_row, encode_row
from tests.gateway.billing.ledger.receipts import a_receipt, write_chain

ROWS_PER_SEGMENT = 3


@pytest.fixture
def chain(tmp_path: Path) -> Path:
    """A replica's folder with three segments of three rows."""
    folder, head = tmp_path / "replica", GENESIS
    folder.mkdir()
    for number in (1, 2, 3):
        lines = []
        for _ in range(ROWS_PER_SEGMENT):
            line, head = encode_row(a_receipt(end_user='a "b" \n ü'), head)
            lines.append(line)
        (folder / f"{number:010d}.jsonl").write_bytes(b"".join(lines))
    return folder


def edit(file: Path, lines: list[bytes]) -> None:
    file.write_bytes(b"".join(lines))


def broken(chain: Path) -> str:
    found = verify(chain.parent).broken
    return f"{found.file.name}:{found.line}" if found else "nothing"


def test_a_row_is_json_with_plain_decimals() -> None:
    line, digest = encode_row(a_receipt(cost="0", price_output="0.0000001"), GENESIS)
    row = json.loads(line)
    assert list(row)[:2] == ["v", "prev"] and list(row)[-1] == "hash"
    assert (row["v"], row["prev"], row["hash"]) == (1, GENESIS, digest)
    assert (row["cost"], row["price_output"], row["input_uncached"]) == ("0", "0.0000001", 36)
    assert check_row(line) == (GENESIS, digest)


def test_an_intact_ledger(chain: Path) -> None:
    last = json.loads((chain / "0000000003.jsonl").read_bytes().splitlines()[-1])
    assert verify(chain.parent) == (9, {"replica": last["hash"]}, (), ())


def test_a_ledger_without_rows(tmp_path: Path) -> None:
    assert verify(tmp_path) == verify(tmp_path / "absent") == (0, {}, (), ())


def test_every_flipped_byte_is_detected(chain: Path) -> None:
    file = chain / "0000000003.jsonl"
    line = file.read_bytes().splitlines(keepends=True)[-1]  # no row follows, so it must contradict its own hash
    for at in range(len(line)):
        with pytest.raises(RowError):
            check_row(line[:at] + bytes([line[at] ^ 1]) + line[at + 1 :])
    for number in (1, 2, 3):
        file = chain / f"{number:010d}.jsonl"
        good = file.read_bytes()
        for at in range(0, len(good), 97):
            file.write_bytes(good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :])
            assert broken(chain) == f"{file.name}:{good.count(10, 0, at) + 1}", at
        file.write_bytes(good)


@pytest.mark.parametrize("file_number", [1, 2, 3])
def test_removed_repeated_and_moved_rows_are_detected(chain: Path, file_number: int) -> None:
    file = chain / f"{file_number:010d}.jsonl"
    first, second, third = file.read_bytes().splitlines(keepends=True)
    edit(file, [second, third])
    assert broken(chain) == f"{file.name}:1"
    edit(file, [first, third])
    assert broken(chain) == f"{file.name}:2"
    edit(file, [first, first, second, third])
    assert broken(chain) == f"{file.name}:2"
    edit(file, [first, third, second])
    assert broken(chain) == f"{file.name}:2"


def test_a_truncated_segment_is_detected_at_the_next_one(chain: Path) -> None:
    file = chain / "0000000001.jsonl"
    edit(file, file.read_bytes().splitlines(keepends=True)[:2])
    assert broken(chain) == "0000000002.jsonl:1"


def test_a_missing_segment_is_detected(chain: Path) -> None:
    (chain / "0000000002.jsonl").unlink()
    assert broken(chain) == "0000000002.jsonl:1"


def test_the_oldest_segments_may_be_removed(chain: Path) -> None:
    (chain / "0000000001.jsonl").unlink()
    assert verify(chain.parent)[0] == 6 and broken(chain) == "nothing"


def test_a_row_of_another_chain_is_detected(chain: Path) -> None:
    line, _ = encode_row(a_receipt(), GENESIS)
    file = chain / "0000000003.jsonl"
    file.write_bytes(file.read_bytes() + line)
    assert broken(chain) == "0000000003.jsonl:4"


def test_an_incomplete_row_is_named(chain: Path) -> None:
    file = chain / "0000000003.jsonl"
    file.write_bytes(file.read_bytes()[:-20])
    found = verify(chain.parent).broken
    assert found and "incomplete" in found.why and found.line == 3


def test_a_newer_schema_is_an_error() -> None:
    line, _ = encode_row(a_receipt(), GENESIS)
    with pytest.raises(UnknownVersion, match="version 2"):
        check_row(line.replace(b'{"v":1,', b'{"v":2,'))


def test_other_json_is_no_row() -> None:
    with pytest.raises(RowError, match="no ledger row"):
        check_row(b"{}\n")


def test_a_broken_chain_does_not_hide_another_one(chain: Path) -> None:
    other = chain.with_name("other")
    shutil.copytree(chain, other)
    for folder in (chain, other):
        (folder / "0000000002.jsonl").unlink()
    found = verify(chain.parent)
    assert [one.file.parent.name for one in found.all_broken] == ["other", "replica"]
    assert found.broken is found.all_broken[0] and found.rows == 6


def test_an_intact_row_that_readers_set_aside_is_named(tmp_path: Path) -> None:
    write_chain(tmp_path / "replica", [a_receipt(), a_receipt(output=2**64 - 1), a_receipt(cost="1e999")])
    found = verify(tmp_path)
    assert found.rows == 3 and found.broken is None
    assert [(one.file.name, one.line, one.why) for one in found.unreadable] == [
        ("0000000001.jsonl", 2, "output is 18446744073709551615"),
        ("0000000002.jsonl", 1, "cost is '1e999'"),
    ]
