"""What the verbs share: how they are made, how they speak, and how they give up."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from gateway.policy import Check, Policy
from gateway.policy.file import PolicyError, load_policy
from gateway.settings import Settings, SettingsError, load_settings, misspelled_variables

PROBLEM = 1
MISUSE = 2

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")]


def verb_app(**options: Any) -> typer.Typer:
    """Help is plain text, and a crash is Python's traceback: Typer's own would show local variables, and so secrets."""
    common: dict[str, Any] = {
        "add_completion": False,
        "rich_markup_mode": None,
        "pretty_exceptions_enable": False,
        "no_args_is_help": True,
        "context_settings": {"help_option_names": ["-h", "--help"]},
    }
    return typer.Typer(**(common | options))


def fail(message: str, *, code: int = PROBLEM) -> NoReturn:
    complain(message)
    raise typer.Exit(code)


def complain(message: str, *, style: str = "red") -> None:
    """To stderr, one line per line of the message, never wrapped: scripts and editors read them."""
    console = Console(stderr=True)
    for line in message.splitlines():
        console.print(Text(line, style=style), soft_wrap=True)


def warn(message: str) -> None:
    complain(f"warning: {message}", style="yellow")


def say(line: str = "", *, style: str = "") -> None:
    Console().print(Text(line, style=style), soft_wrap=True)


def say_json(value: Any) -> None:
    typer.echo(json.dumps(value, indent=2, default=str))


def say_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table for people; where nobody watches, the same columns without decoration and never cut."""
    console = Console()
    if console.is_terminal:
        table = Table(box=None, pad_edge=False, header_style="bold")
        for column in columns:
            table.add_column(column, overflow="fold")
        for row in rows:
            table.add_row(*(Text(cell) for cell in row))
        console.print(table)
        return
    widths = [max(map(len, cells)) for cells in zip(columns, *rows, strict=True)]
    for row in (columns, *rows):
        typer.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


@contextlib.contextmanager
def well_formed() -> Iterator[None]:
    """A `ValueError` in here is the fault of the option that was given, and told as that."""
    try:
        yield
    except (ValueError, OverflowError) as error:
        raise typer.BadParameter(str(error)) from None


def settings_or_exit(form: type[Settings] = Settings, **options: Any) -> Settings:
    """The settings; an option that is not None wins over its variable."""
    for typo in misspelled_variables():
        warn(typo)
    try:
        return load_settings(form, **options)
    except SettingsError as error:
        fail(str(error), code=MISUSE)


def policy_or_exit(path: Path, *, checks: Sequence[Check] = ()) -> Policy:
    try:
        return load_policy(path, checks=checks)
    except PolicyError as error:
        fail(str(error))


__all__ = [
    "MISUSE", "PROBLEM", "AsJson", "complain", "fail", "policy_or_exit", "say", "say_json", "say_table",
    "settings_or_exit", "verb_app", "warn", "well_formed",
]  # fmt: skip
