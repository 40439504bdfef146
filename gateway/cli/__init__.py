"""The `warmpath` command. Each verb is a module in this package, imported only when the verb is used.

A verb's module has an `app` made by `common.verb_app()`, with one command or with subcommands. All verbs have the same
exit codes: 0 success, 1 a problem was found, 2 wrong usage. Results go to stdout, everything else to stderr. Verbs
whose results scripts may read have `--json`.
"""

from __future__ import annotations

import importlib
from typing import Annotated, Any

import typer
from typer.core import TyperGroup
from typer.main import get_command

from gateway import __version__
from gateway.cli.common import verb_app

# In the order of the help.
VERBS = (
    "up",
    "serve",
    "engine",
    "check",
    "explain",
    "simulate",
    "batch",
    "keys",
    "usage",
    "prices",
    "doctor",
    "route-log",
)


class _Verbs(TyperGroup):
    def list_commands(self, ctx: Any) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in VERBS:
            return None
        return get_command(importlib.import_module(f"gateway.cli.{cmd_name.replace('-', '_')}").app)


app = verb_app(cls=_Verbs)


def _print_version(requested: bool) -> None:
    if requested:
        typer.echo(f"warmpath {__version__}")
        raise typer.Exit


@app.callback()
def warmpath(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """An OpenAI-compatible gateway and caching proxy in front of inference servers, with its own engine.

    Settings are environment variables WARMPATH_*. Options override them.
    """


__all__ = ["VERBS", "app"]
