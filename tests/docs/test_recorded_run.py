"""The recorded run has every verb, and its command lines are still valid."""

from __future__ import annotations

import re
import shlex
from typing import Any

import pytest
import typer.main

from docs.record import PAGE, SECRET
from gateway.cli import VERBS, app

LINES = re.findall(r"^\$ (warmpath .*)$", PAGE.read_text(), re.MULTILINE)


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_is_recorded(verb: str) -> None:
    assert any(shlex.split(line)[1] == verb for line in LINES), (
        "add it to docs/record.py, and run `python -m docs.record`"
    )


@pytest.mark.parametrize("line", LINES)
def test_recorded_command_lines_are_valid(line: str) -> None:
    command: Any = typer.main.get_command(app)
    words = shlex.split(line)[1:]
    while words and hasattr(command, "get_command") and not words[0].startswith("-"):
        command = command.get_command(None, words.pop(0))
        assert command is not None, line
    context = command.context_class(command, info_name="warmpath")
    command.make_parser(context).parse_args(list(words))  # raises an error for unknown options


def test_no_secret_is_recorded() -> None:
    assert not SECRET.search(PAGE.read_text())
