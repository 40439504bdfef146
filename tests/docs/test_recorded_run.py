"""The recorded run has every command, and its command lines are still valid."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from typing import Any

import pytest
import typer.main

from docs.record import PAGE, SECRET
from gateway.cli import app

LINES = re.findall(r"^\$ (warmpath .*)$", PAGE.read_text(), re.MULTILINE)


def leaves(command: Any, words: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The words of each command that can be run."""
    if not hasattr(command, "list_commands"):
        yield words
        return
    if getattr(command, "invoke_without_command", False) and words:
        yield words
    for name in command.list_commands(None):
        yield from leaves(command.get_command(None, name), (*words, name))


def test_every_command_is_recorded() -> None:
    recorded = [tuple(shlex.split(line)[1:]) for line in LINES]
    missing = [" ".join(words) for words in leaves(typer.main.get_command(app)) if not any(
        line[: len(words)] == words for line in recorded
    )]  # fmt: skip
    assert not missing, "run `python -m docs.record`"


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
