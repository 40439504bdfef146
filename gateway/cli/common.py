"""Shared by all commands: the Typer app, output to stdout and stderr, errors, settings and policy."""

from __future__ import annotations

import contextlib
import itertools
import json
import re
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.text import Text

from gateway.cli.tables import table_lines
from gateway.cli.verb_app import verb_app
from gateway.policy import Check, Policy
from gateway.policy.file import PolicyError, load_policy
from gateway.settings import Settings, SettingsError, load_settings, misspelled_variables

PROBLEM = 1
MISUSE = 2

# Control characters, line and paragraph separators, marks that change the direction of text, and lone surrogates.
_UNPRINTABLE = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff]")

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")]


def printable(text: str) -> str:
    """Return the text with every character escaped that could move a terminal's cursor, recolour, hide or reorder text.

    Names come from clients and servers. A line break in a name could otherwise look like a further row.
    """
    return _UNPRINTABLE.sub(lambda found: found[0].encode("unicode_escape").decode("ascii"), text)


def fail(message: str, *, code: int = PROBLEM) -> NoReturn:
    """Print an error to stderr and exit."""
    print_stderr(message)
    raise typer.Exit(code)


def print_stderr(message: str, *, style: str = "red") -> None:
    """Print to stderr. Lines are never wrapped, since scripts and editors parse them."""
    console = Console(stderr=True)
    for line in message.splitlines():
        console.print(Text(printable(line), style=style), soft_wrap=True)


def warn(message: str) -> None:
    """Print a warning to stderr."""
    print_stderr(f"warning: {message}", style="yellow")


def print_line(line: str = "", *, style: str = "") -> None:
    """Print one line to stdout, never wrapped."""
    Console().print(Text(printable(line), style=style), soft_wrap=True)


def print_json(value: Any) -> None:
    """Print a value to stdout as JSON."""
    typer.echo(json.dumps(value, indent=2, default=str))


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table to stdout, at most as wide as the terminal, or as COLUMNS if that is set.

    Without COLUMNS, the width of output to a file or a pipe is not limited.
    """
    console = Console()
    width = console.width if console.is_terminal else shutil.get_terminal_size((0, 0)).columns or None  # by COLUMNS
    lines = table_lines(columns, [[printable(cell) for cell in row] for row in rows], width)
    for is_head, part in itertools.groupby(lines, key=lambda line: line[1]):  # one call for each row would take long
        text = "\n".join(line for line, _ in part)
        console.print(Text(text, style="bold" if is_head else ""), soft_wrap=True)


@contextlib.contextmanager
def usage_error() -> Iterator[None]:
    """Report a `ValueError` in the block as wrong usage of an option."""
    try:
        yield
    except (ValueError, OverflowError) as error:
        raise typer.BadParameter(str(error)) from None


def settings_or_exit(form: type[Settings] = Settings, **options: Any) -> Settings:
    """The settings. An option that is not None overrides its variable. Exits if a setting is invalid."""
    for typo in misspelled_variables():
        warn(typo)
    try:
        return load_settings(form, **options)
    except SettingsError as error:
        fail(str(error), code=MISUSE)


def policy_or_exit(path: Path, *, checks: Sequence[Check] = ()) -> Policy:
    """The policy in a file. Exits if it is invalid."""
    try:
        return load_policy(path, checks=checks)
    except PolicyError as error:
        fail(str(error))


__all__ = [
    "MISUSE",
    "PROBLEM",
    "AsJson",
    "fail",
    "policy_or_exit",
    "print_json",
    "print_line",
    "print_stderr",
    "print_table",
    "printable",
    "settings_or_exit",
    "usage_error",
    "verb_app",
    "warn",
]  # fmt: skip
