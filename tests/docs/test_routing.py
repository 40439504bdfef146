import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from gateway.cli import app
from tests.docs.markdown import ROOT, blocks

COMMANDS = [
    line
    for block in blocks(ROOT / "docs" / "explanation" / "routing.md")
    for line in block.text.splitlines()
    if line.startswith("warmpath simulate")
]


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_the_simulation_that_the_page_shows_runs(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    _, *arguments = shlex.split(command)
    result = CliRunner().invoke(app, [*arguments, "--only", "warmpath"])
    assert result.exit_code == 0, result.output
    assert "STRATEGY" in result.stdout and "x mean" in result.stdout
    assert (tmp_path / "routing.svg").read_text().startswith("<svg ")


def test_there_is_one() -> None:
    assert COMMANDS
