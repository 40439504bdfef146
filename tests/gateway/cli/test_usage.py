"""`warmpath usage` and its subcommands."""

from __future__ import annotations

import asyncio
import csv
import json
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from gateway.billing.ledger import Ledger, UnbilledWork
from gateway.cli import app, usage_export
from gateway.core.ids import new_event_id
from gateway.core.times import rfc3339
from tests.gateway.billing.ledger.receipts import a_receipt, write_chain


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


HOSTILE = "eve\x1b[2J\x9b1A\u202e\nacme  99\t\x00"


@pytest.mark.parametrize("terminal", [False, True])
def test_names_cannot_move_the_cursor_or_look_like_rows(
    tmp_path: Path, terminal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fill() -> None:
        async with Ledger(tmp_path / "ledger", "replica") as ledger:
            ledger.append(a_receipt(end_user=HOSTILE))

    asyncio.run(fill())
    if terminal:
        monkeypatch.setenv("FORCE_COLOR", "1")
        monkeypatch.setenv("COLUMNS", "300")
    shown = usage(tmp_path / "ledger", "--by", "user").stdout
    names = shown.replace("\x1b[1m", "").replace("\x1b[0m", "")  # rich's own: bold, and its end
    assert names.replace("\n", "").isprintable()
    assert "eve\\x1b[2J\\x9b1A\\u202e\\nacme" in "".join(names.split())


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
            "cache_write_1h": 0,
            "remainder": 0,
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
def test_times_are_utc_by_default(ledger: Path, until: str, requests: int) -> None:
    (line,) = json.loads(usage(ledger, "--until", until, "--json").stdout)
    assert line["requests"] == requests


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--by", "colour"], "tenant, organisation, key, user, model, class, tier, month, week, day, hour"),
        (["--by", "tenants"], "did you mean 'tenant'?"),
        (["--since", "yesterdya"], "as in 2h or 7d, today, yesterday, a day"),
        (["--json", "--csv"], "not both"),
        (["--json", "verify"], "must follow verify"),
    ],
)
def test_invalid_options_are_explained(ledger: Path, arguments: list[str], message: str) -> None:
    result = usage(ledger, *arguments)
    assert result.exit_code == 2 and message in result.stderr


def test_verify(ledger: Path) -> None:
    result = usage(ledger, "verify")
    assert result.exit_code == 0 and result.stdout.startswith("3 rows verified\nreplica  ")
    segment = ledger / "replica" / "0000000001.jsonl"
    segment.write_bytes(segment.read_bytes().replace(b'"tenant":"other"', b'"tenant":"0ther"'))
    result = usage(ledger, "verify")
    assert result.exit_code == 1 and f"{segment}:3: the row was changed" in result.stderr
    result = usage(ledger, "verify", "--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["broken"] == {
        "file": str(segment),
        "line": 3,
        "why": "the row was changed: its content does not match its hash",
    }


def test_receipts(ledger: Path) -> None:
    rows = json.loads(usage(ledger, "receipts", "--last", "2", "--json").stdout)
    assert [(row["tenant"], row["cost"]) for row in rows] == [("other", None), ("acme", "0.00000544")]
    lines = usage(ledger, "receipts").stdout.splitlines()
    assert len(lines) == 4 and "unpriced" in lines[1] and "0.00000544 USD" in lines[2]


def test_a_missing_ledger(tmp_path: Path) -> None:
    for verb in ([], ["verify"], ["receipts"]):
        result = usage(tmp_path / "nowhere", *verb)
        assert result.exit_code == 1 and "no ledger in " in result.stderr


def test_an_unreadable_ledger(ledger: Path) -> None:
    (ledger / "replica" / "0000000001.jsonl").unlink()
    (ledger / "replica" / "0000000001.parquet").write_bytes(b"PAR1")
    (ledger / "replica" / "0000000001.manifest").write_bytes(b"{}")
    result = usage(ledger)
    assert result.exit_code == 1 and "warmpath usage verify" in result.stderr


def test_an_unreadable_row_is_set_aside(ledger: Path) -> None:
    segment = ledger / "replica" / "0000000001.jsonl"
    whole = json.loads(usage(ledger, "--json").stdout)[0]["requests"]
    with segment.open("ab") as file:
        file.write(b"{\n")
    for options in ((), ("--json",), ("--csv",), ("receipts",), ("export", "jsonl"), ("export", "focus")):
        result = usage(ledger, *options)
        assert result.exit_code == 0, result.stderr
        assert "1 unreadable row is set aside and not counted" in result.stderr
        assert f"{segment}:4: " in result.stderr.replace("\n", "")
    assert json.loads(usage(ledger, "--json").stdout)[0]["requests"] == whole
    result = usage(ledger, "verify")
    assert result.exit_code == 1 and f"{segment}:4: this is no ledger row" in result.stderr


POLICY = """
deployments:
  - {name: h200-a, base_url: "http://127.0.0.1:9/v1", model: qwen3-32b, price: {input: 1, output: 2, version: new}}
models: [{name: gpt-4o, deployments: [h200-a]}]
tenants: [{name: acme}]
"""


@pytest.fixture
def policy(tmp_path: Path) -> Path:
    file = tmp_path / "policy.yaml"
    file.write_text(POLICY)
    return file


def test_unpriced_calls_are_listed(ledger: Path) -> None:
    assert "unpriced: gpt-4o on h200-a, 1 calls" in usage(ledger).stderr
    assert usage(ledger, "--tenant", "acme").stderr == ""


def test_reprice_with_and_without_dry_run(ledger: Path, policy: Path) -> None:
    dates = ("--since", "2026-11-01", "--until", "2026-12-01", "--policy", str(policy))
    result = usage(ledger, "reprice", *dates, "--dry-run")
    assert result.exit_code == 0 and result.stdout.startswith("3 of 3 receipts would be corrected\n")
    assert json.loads(usage(ledger, "--json").stdout)[0]["unpriced"] == 1
    result = usage(ledger, "reprice", *dates, "--json")
    # (36 + 64) * 1 + 3 * 2 millionths each, two of which had been billed 0.00000544
    assert json.loads(result.stdout) == {
        "receipts": 3, "corrected": 3, "unpriced": 0, "unreadable": 0, "other_currency": 0,
        "difference": {"USD": "0.00030712"},
    }  # fmt: skip
    (line,) = json.loads(usage(ledger, "--json").stdout)
    assert (line["cost"], line["unpriced"]) == ({"USD": "0.000318"}, 0)
    assert "0 of 3" in usage(ledger, "reprice", *dates).stdout
    assert usage(ledger, "verify").stdout.startswith("6 rows verified\n")


def test_reprice_requires_a_period(ledger: Path, policy: Path) -> None:
    result = usage(ledger, "reprice", "--since", "2026-11-01", "--policy", str(policy))
    assert result.exit_code == 2 and "--until" in result.stderr


def test_exports(ledger: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(usage_export, "ACCEPTED_SECONDS", 1e9)
    rows = [json.loads(line) for line in usage(ledger, "export", "jsonl", "--tenant", "acme").stdout.splitlines()]
    assert [(row["kind"], row["cost"]) for row in rows] == [("receipt", "0.00000544")] * 2
    table = list(csv.DictReader(usage(ledger, "export", "csv").stdout.splitlines()))
    assert [row["tenant"] for row in table] == ["acme", "acme", "other"] and table[2]["cost"] == ""
    focus = usage(ledger, "export", "focus", "--provider", "Us")
    assert {row["ProviderName"] for row in csv.DictReader(focus.stdout.splitlines())} == {"Us"}
    assert "1 calls without a price" in focus.stderr
    events = usage(
        ledger, "export", "stripe", "--customer", "acme=cus_1", "--customer", "other=cus_2", "--value", "output"
    )
    assert [json.loads(line)["payload"]["value"] for line in events.stdout.splitlines()] == ["3"] * 3
    customers = ("--customer", "acme=cus_1", "--customer", "other=cus_2")
    again = usage(ledger, "export", "stripe", *customers)
    assert again.stdout == "" and "3 events not exported: an earlier export has them" in again.stderr
    assert len(usage(ledger, "export", "stripe", *customers, "--again", "1").stdout.splitlines()) == 3
    metered = [json.loads(line) for line in usage(ledger, "export", "openmeter", *customers).stdout.splitlines()]
    assert {(each["specversion"], each["data"]["output"]) for each in metered} == {("1.0", 3)}
    assert {each["subject"] for each in metered} == {"cus_1", "cus_2"} and len({each["id"] for each in metered}) == 3
    assert usage(ledger, "export", "openmeter", *customers).stdout == "", "exported once"
    assert len(usage(ledger, "export", "openmeter", *customers, "--again", "1").stdout.splitlines()) == 3
    result = usage(ledger, "export", "parquet", "--out", str(tmp_path / "rows.parquet"))
    assert result.exit_code == 0 and "3 rows written" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["parquet"], 2, "--out FILE"),
        (["xml"], 2, "xml"),
        (["stripe"], 1, "the tenant 'acme' has no Stripe customer"),
        (["stripe", "--customer", "acme"], 2, "as in acme=cus_123"),
        (["stripe", "--value", "words"], 2, "not one of total"),
        (["csv", "--out", "/nowhere/at/all.csv"], 1, "/nowhere/at/all.csv"),
    ],
)
def test_invalid_export_options_are_explained(ledger: Path, arguments: list[str], code: int, message: str) -> None:
    result = usage(ledger, "export", *arguments)
    assert result.exit_code == code and message in result.stderr


def test_compact_with_nothing_to_do(ledger: Path) -> None:
    assert "nothing to compact" in usage(ledger, "compact", "--older-than", "1ms").stdout
    result = usage(ledger, "compact", "--older-than", "soon")
    assert result.exit_code == 2 and "a duration" in result.stderr


def test_reconcile_offline(ledger: Path) -> None:
    assert "fewer than two samples" in usage(ledger, "reconcile", "--offline").stdout
    marks = [("2026-11-20T09:00:00.000000Z", 500, 50), ("2026-11-20T12:00:00.000000Z", 700, 57)]
    lines = [
        json.dumps({"at": at, "deployment": "h200-a", "model": "m", "input": tokens_in, "output": tokens_out})
        for at, tokens_in, tokens_out in marks
    ]
    (ledger / "replica" / "engine-counters.jsonl").write_text("\n".join(lines) + "\n")
    result = usage(ledger, "reconcile", "--offline")
    assert result.exit_code == 1 and "drift 14.29%, more than 0.1%" in result.stderr
    head, span, total = [line.split() for line in result.stdout.splitlines()]
    assert span[2:] == ["2026-11-20T09:00", "2026-11-20T12:00", "200", "200", "0", "0", "7", "6", "0", "1"]
    assert total[2:] == ["total", "200", "200", "0", "0", "7", "6", "0", "1"] and head[0] == "DEPLOYMENT"
    assert usage(ledger, "reconcile", "--offline", "--tolerance", "15%").exit_code == 0
    assert usage(ledger, "reconcile", "--offline", "--tolerance", "much").exit_code == 2


def test_reconcile_with_an_unreachable_engine(ledger: Path, policy: Path) -> None:
    result = usage(ledger, "reconcile", "--policy", str(policy))
    assert result.exit_code == 0 and "fewer than two samples" in result.stdout


def test_the_month_in_progress_is_forecast(tmp_path: Path) -> None:
    now, old = rfc3339(time.time_ns() - 10**9), "2020-01-01T00:00:00.000000Z"
    rows = [a_receipt(cost="0.25", started=when, finished=when) for when in (old, now)]
    write_chain(tmp_path / "replica", rows)
    (line,) = json.loads(usage(tmp_path, "forecast", "--json").stdout)
    assert (line["tenant"], line["spent"], line["currency"], line["by_weekday"]) == ("acme", "0.25", "USD", None)
    assert line["linear"] is None or float(line["linear"]) >= 0.25
    assert usage(tmp_path, "forecast", "--by", "model").stdout.split()[:2] == ["MODEL", "SPENT"]
    assert "'day' is not one of tenant" in usage(tmp_path, "forecast", "--by", "day").stderr


def test_unbilled_attempts_are_summed(tmp_path: Path) -> None:
    fields: dict[str, Any] = {
        "call_id": "req_1", "attempt": 1, "tenant": "acme", "key_id": "k", "model_asked": "m", "deployment": "a",
        "started": "2026-11-20T10:00:00.000001Z", "finished": "2026-11-20T10:00:01.000001Z", "cache_read": 0,
        "cache_write": 0, "reasoning": 0, "trace_id": "0" * 32,
    }  # fmt: skip
    lost: dict[str, Any] = {
        "outcome": "hedge_lost",
        "exact": False,
        "input_uncached": 10,
        "output": 2,
        "cost": "0.5",
        "currency": "USD",
    }
    failed: dict[str, Any] = {
        "outcome": "status_503", "exact": False, "input_uncached": 0, "output": 0, "cost": "0", "currency": None,
    }  # fmt: skip
    rows = [UnbilledWork(event_id=new_event_id(), **fields, **more) for more in (lost, lost, failed)]
    write_chain(tmp_path / "replica", rows)
    first, second = json.loads(usage(tmp_path, "unbilled", "--json").stdout)
    assert first == {
        "deployment": "a", "outcome": "hedge_lost", "attempts": 2, "input": 20, "output": 4, "inexact": 2,
        "unpriced": 0, "cost": {"USD": "1"},
    }  # fmt: skip
    assert (second["outcome"], second["inexact"], second["cost"]) == ("status_503", 0, {})
    assert json.loads(usage(tmp_path, "unbilled", "--tenant", "other", "--json").stdout) == []
    assert "a hedge_lost 2 20 4 1 USD 2 0" in " ".join(usage(tmp_path, "unbilled").stdout.split())
