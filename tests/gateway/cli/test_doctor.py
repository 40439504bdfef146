import json
from pathlib import Path

import pytest

from tests.gateway.cli.conftest import Warmpath
from tests.gateway.diagnosis.test_breaks import LATER, STABLE, DiagnosisRig, chat


def write_summaries(folder: Path) -> DiagnosisRig:
    """Write summaries of calls with a clock in large prompts, which costs tokens, and a folder in small ones, often."""
    rig = DiagnosisRig(folder / "data" / "diagnosis")
    for minute in range(2):
        rig.call(chat(f"Current time: 09:0{minute}\n{STABLE * 4}", *LATER[: 2 * minute]), key="large")
    for n in range(3):
        rig.call(chat(f"cwd: /home/ada/{n}{n}{n}\n{STABLE}", user=str(n)), key="small")
    return rig


def test_findings_are_ranked_each_with_the_policy_line_that_fixes_it(warmpath: Warmpath, tmp_path: Path) -> None:
    write_summaries(tmp_path)
    result = warmpath("doctor", "--data", "data")
    assert result.exit_code == 0, result.stderr
    lines = result.stdout.splitlines()
    assert lines[0].startswith("5 calls, ")
    table = [line.split() for line in lines if line[:2] in ("1.", "2.")]
    assert [(row[-1], row[6:8]) for row in table[:2]] == [("clock", ["t", "large"]), ("cwd", ["t", "small"])]
    assert (
        "1. canonicalise: {exceptions: [{tenant: t, model: m, level: full, opt_in: [volatile_to_user]}]}"
        in result.stdout
    )
    assert "2. canonicalise: {exceptions: [{tenant: t, model: m, level: full, opt_in: [volatile_to_end]}]}" in (
        result.stdout
    )


@pytest.mark.parametrize("by", ["tokens", "seconds", "money"])
def test_rankings(warmpath: Warmpath, tmp_path: Path, by: str) -> None:
    write_summaries(tmp_path)
    found = json.loads(warmpath("doctor", "--data", "data", "--by", by, "--json").stdout)["findings"]
    lost = [float(finding["lost_cost" if by == "money" else f"lost_{by}"]) for finding in found]
    assert lost == sorted(lost, reverse=True)
    assert all(lost)


def test_only_recent_calls(warmpath: Warmpath, tmp_path: Path) -> None:
    write_summaries(tmp_path)  # in November 2025
    assert "0 calls" in warmpath("doctor", "--data", "data", "--since", "1h").stdout


def test_no_findings(warmpath: Warmpath, tmp_path: Path) -> None:
    DiagnosisRig(tmp_path / "data" / "diagnosis").call(chat())
    assert "no broken prefixes found" in warmpath("doctor", "--data", "data").stdout


def test_no_summaries(warmpath: Warmpath) -> None:
    result = warmpath("doctor")
    assert result.exit_code == 1
    assert "enable them in the policy, as in `diagnosis: {sample: 10%}`" in result.stderr


@pytest.mark.parametrize("options", [("--by", "weight"), ("--since", "yesterday")])
def test_invalid_options_are_wrong_usage(warmpath: Warmpath, options: tuple[str, str]) -> None:
    assert warmpath("doctor", *options).exit_code == 2
