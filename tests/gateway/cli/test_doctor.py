import json
from pathlib import Path

import pytest

from tests.gateway.cli.conftest import Warmpath
from tests.gateway.diagnosis.test_breaks import LATER, STABLE, Desk, chat


def sick(folder: Path) -> Desk:
    """A clock in large prompts and a folder in small ones: the first costs tokens, the other comes often."""
    desk = Desk(folder / "data" / "diagnosis")
    for minute in range(2):
        desk.call(chat(f"Current time: 09:0{minute}\n{STABLE * 4}", *LATER[: 2 * minute]), key="large")
    for n in range(3):
        desk.call(chat(f"cwd: /home/ada/{n}{n}{n}\n{STABLE}", user=str(n)), key="small")
    return desk


def test_findings_are_ranked_each_with_the_line_that_mends_it(warmpath: Warmpath, tmp_path: Path) -> None:
    sick(tmp_path)
    told = warmpath("doctor", "--data", "data")
    assert told.exit_code == 0, told.stderr
    lines = told.stdout.splitlines()
    assert lines[0].startswith("5 calls, ")
    table = [line.split() for line in lines if line[:2] in ("1.", "2.")]
    assert [(row[-1], row[6:8]) for row in table[:2]] == [("clock", ["t", "large"]), ("cwd", ["t", "small"])]
    assert (
        "1. canonicalise: {exceptions: [{tenant: t, model: m, level: full, opt_in: [volatile_to_user]}]}" in told.stdout
    )
    assert "2. canonicalise: {exceptions: [{tenant: t, model: m, level: full, opt_in: [volatile_to_end]}]}" in (
        told.stdout
    )


@pytest.mark.parametrize("by", ["tokens", "seconds", "money"])
def test_by_what_they_are_ranked(warmpath: Warmpath, tmp_path: Path, by: str) -> None:
    sick(tmp_path)
    found = json.loads(warmpath("doctor", "--data", "data", "--by", by, "--json").stdout)["findings"]
    lost = [float(finding["lost_cost" if by == "money" else f"lost_{by}"]) for finding in found]
    assert lost == sorted(lost, reverse=True)
    assert all(lost)


def test_only_of_late(warmpath: Warmpath, tmp_path: Path) -> None:
    sick(tmp_path)  # in November 2025
    assert "0 calls" in warmpath("doctor", "--data", "data", "--since", "1h").stdout


def test_nothing_to_find(warmpath: Warmpath, tmp_path: Path) -> None:
    Desk(tmp_path / "data" / "diagnosis").call(chat())
    assert "nothing breaks prefixes" in warmpath("doctor", "--data", "data").stdout


def test_nothing_to_read(warmpath: Warmpath) -> None:
    told = warmpath("doctor")
    assert told.exit_code == 1
    assert "switch them on in the policy, as in `diagnosis: {sample: 10%}`" in told.stderr


@pytest.mark.parametrize("options", [("--by", "weight"), ("--since", "yesterday")])
def test_what_can_not_be_meant(warmpath: Warmpath, options: tuple[str, str]) -> None:
    assert warmpath("doctor", *options).exit_code == 2
