import importlib.util
import os
import sys

import pytest

from tests.gateway.cli.conftest import Warmpath


class Replaced(Exception):
    """The command line with which the process would have been replaced."""


@pytest.fixture
def replaced_by(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    command: list[str] = []

    def execv(path: str, arguments: list[str]) -> None:
        command.extend([path, *arguments[1:]])
        raise Replaced

    monkeypatch.setattr(os, "execv", execv)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    return command


def test_the_engine_replaces_the_process(warmpath: Warmpath, replaced_by: list[str]) -> None:
    warmpath("engine")
    assert replaced_by == [sys.executable, "-m", "backend", "--model", "demo", "--port", "8081"]


def test_further_options_are_passed_unchanged(warmpath: Warmpath, replaced_by: list[str]) -> None:
    warmpath("engine", "--dtype", "float32", "--port", "9", "--model", "Qwen/Qwen3-0.6B", "--host=0.0.0.0", "-v")
    model = ["--model", "Qwen/Qwen3-0.6B", "--port", "9"]
    assert replaced_by[3:] == [*model, "--dtype", "float32", "--host=0.0.0.0", "-v"]


def test_without_the_extra_the_error_says_what_to_install(
    warmpath: Warmpath, replaced_by: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    result = warmpath("engine")
    assert result.exit_code == 2
    assert "pip install 'warmpath[engine]'" in result.stderr
    assert replaced_by == []
