import os
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from gateway.cli import app

Warmpath = Callable[..., Result]


@pytest.fixture
def warmpath(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Warmpath:
    """Runs the command in an empty folder, without settings from the environment."""
    for name in list(os.environ):
        if name.startswith(("WARMPATH_", "OTEL_")):
            monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str, stdin: str = "", **env: str) -> Result:
        return CliRunner().invoke(app, arguments, input=stdin, env=env, prog_name="warmpath")

    return run
