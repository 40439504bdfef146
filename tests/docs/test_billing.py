"""docs/explanation/billing.md: its tables are the code's, its policy is one, and its commands run."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from gateway.billing.ledger.reader import TOKENS
from gateway.cli import app, usage_export
from gateway.policy.file import parse_policy
from gateway.types import Outcome
from tests.docs.markdown import ROOT, blocks, code_spans, section, table_rows
from tests.gateway.billing.ledger.receipts import a_receipt, write_chain

PAGE = ROOT / "docs" / "explanation" / "billing.md"
BLOCKS = blocks(PAGE)
COMMANDS = [line for block in BLOCKS if block.language == "bash" for line in block.text.splitlines()]


def test_every_bucket_is_documented() -> None:
    rows = table_rows(section(PAGE, "What is counted"))
    assert [span for row in rows for span in code_spans(row[0])] == list(TOKENS)


def test_every_outcome_is_documented() -> None:
    documented = {span for row in table_rows(section(PAGE, "What is counted")) for span in code_spans(row[2])}
    assert documented >= {outcome.value for outcome in Outcome}


def test_the_example_is_a_valid_policy() -> None:
    (block,) = [block for block in BLOCKS if block.language == "yaml"]
    policy = parse_policy(block.text.encode(), file="billing.md")
    assert len(policy.deployments[0].price) == 4 and policy.models[0].cache_price


@pytest.fixture
def ledger(tmp_path: Path) -> Path:
    finished = [f"2026-11-{day:02}T10:00:00.000000Z" for day in (5, 19, 20)]
    rows = [a_receipt(tenant="dev", model_asked="demo", deployment="local", finished=moment) for moment in finished]
    write_chain(tmp_path / "ledger" / "replica", rows)
    return tmp_path / "ledger"


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_runs(command: str, ledger: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(usage_export, "ACCEPTED_SECONDS", 1e9)  # the page's days may be long ago
    warmpath, *arguments = shlex.split(command)
    assert warmpath == "warmpath"
    done = CliRunner().invoke(app, arguments, env={"WARMPATH_LEDGER_DIR": str(ledger)})
    engine_is_away = command == "warmpath usage reconcile" and "its counters could not be read" in done.output
    assert done.exit_code == int(engine_is_away), done.output
    if "--out" in arguments:
        assert (tmp_path / arguments[arguments.index("--out") + 1]).stat().st_size
    else:
        assert done.stdout


def test_the_example_program_compiles() -> None:
    (block,) = [block for block in BLOCKS if block.language == "python"]
    compile(block.text, "billing.md", "exec")
