"""`warmpath usage`, as a person or a script calls it."""

from __future__ import annotations

import asyncio
import csv
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from gateway.cli import app
from gateway.ledger import Ledger
from tests.gateway.ledger.receipts import a_receipt


@pytest.fixture
def ledger(tmp_path: Path) -> Path:
    async def fill() -> None:
        async with Ledger(tmp_path / "ledger", "replica") as ledger:
            ledger.append(a_receipt(finished="2026-11-19T10:00:00.000000Z"))
            ledger.append(a_receipt(finished="2026-11-20T10:00:00.000000Z"))
            ledger.append(a_receipt(finished="2026-11-20T11:00:00.000000Z", tenant="other", cost=None, currency=None))

    asyncio.run(fill())
    return tmp_path / "ledger"


def usage(ledger: Path, *arguments: str) -> Result:
    return CliRunner().invoke(app, ["usage", *arguments, "--ledger", str(ledger)])


def test_a_table(ledger: Path) -> None:
    lines = [" ".join(line.split()) for line in usage(ledger, "--by", "tenant").stdout.splitlines()]
    assert lines == [
        "TENANT REQUESTS HITS INPUT CACHED SHARE OUTPUT REASONING COST SAVED INEXACT UNPRICED",
        "acme 2 0 72 128 64% 6 4 0.00001088 USD 0.00001152 USD 0 0",
        "other 1 0 36 64 64% 3 2 - - 0 1",
    ]


def test_json(ledger: Path) -> None:
    result = usage(ledger, "--by", "day", "--by", "tenant", "--since", "2026-11-20", "--tenant", "acme", "--json")
    assert json.loads(result.stdout) == [
        {
            "day": "2026-11-20",
            "tenant": "acme",
            "requests": 1,
            "cache_hits": 0,
            "input_uncached": 36,
            "cache_read": 64,
            "cache_write": 0,
            "output": 3,
            "reasoning": 2,
            "audio_input": 0,
            "audio_output": 0,
            "inexact": 0,
            "unpriced": 0,
            "cached_share": 0.64,
            "cost": {"USD": "0.00000544"},
            "saved": {"USD": "0.00000576"},
        }
    ]


def test_csv(ledger: Path) -> None:
    first, second = csv.DictReader(usage(ledger, "--by", "tenant", "--csv").stdout.splitlines())
    assert (first["tenant"], first["requests"], first["cost_USD"]) == ("acme", "2", "0.00001088")
    assert (second["tenant"], second["unpriced"], second["cost_USD"]) == ("other", "1", "")


@pytest.mark.parametrize(
    ("until", "requests"),
    [
        ("2026-11-20", 1),
        ("2026-11-20T10:00:00Z", 1),
        ("2026-11-20T12:00:00+02:00", 1),
        ("2026-11-20T10:00:00.000001", 2),
    ],
)
def test_times_are_utc_unless_they_say_otherwise(ledger: Path, until: str, requests: int) -> None:
    (line,) = json.loads(usage(ledger, "--until", until, "--json").stdout)
    assert line["requests"] == requests


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--by", "colour"], "tenant, key, user, model, class, tier, day, hour"),
        (["--since", "yesterday"], "as in 2026-11-20"),
        (["--json", "--csv"], "not both"),
        (["--json", "verify"], "after verify"),
    ],
)
def test_wrong_options_are_explained(ledger: Path, arguments: list[str], message: str) -> None:
    result = usage(ledger, *arguments)
    assert result.exit_code == 2 and message in result.stderr


def test_verify(ledger: Path) -> None:
    result = usage(ledger, "verify")
    assert result.exit_code == 0 and result.stdout.startswith("3 rows, none of them changed\nreplica  ")
    segment = ledger / "replica" / "0000000001.jsonl"
    segment.write_bytes(segment.read_bytes().replace(b'"tenant":"other"', b'"tenant":"0ther"'))
    result = usage(ledger, "verify")
    assert result.exit_code == 1 and f"{segment}:3: the row was changed" in result.stderr
    result = usage(ledger, "verify", "--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["broken"] == {
        "file": str(segment),
        "line": 3,
        "why": "the row was changed: its content does not have its hash",
    }


def test_receipts(ledger: Path) -> None:
    rows = json.loads(usage(ledger, "receipts", "--last", "2", "--json").stdout)
    assert [(row["tenant"], row["cost"]) for row in rows] == [("other", None), ("acme", "0.00000544")]
    lines = usage(ledger, "receipts").stdout.splitlines()
    assert len(lines) == 4 and "unpriced" in lines[1] and "0.00000544 USD" in lines[2]


def test_a_ledger_that_is_not_there(tmp_path: Path) -> None:
    for verb in ([], ["verify"], ["receipts"]):
        result = usage(tmp_path / "nowhere", *verb)
        assert result.exit_code == 1 and "there is no ledger at" in result.stderr


def test_a_ledger_that_can_not_be_read(ledger: Path) -> None:
    (ledger / "replica" / "0000000001.jsonl").write_bytes(b"{\n")
    result = usage(ledger)
    assert result.exit_code == 1 and "warmpath usage verify" in result.stderr
