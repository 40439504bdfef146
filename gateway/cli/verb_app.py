"""The Typer app of every verb. Imports Typer only, so that `warmpath --help` stays fast."""

from __future__ import annotations

from typing import Any

import typer


def verb_app(**options: Any) -> typer.Typer:
    """A Typer app with plain-text help and Python's own tracebacks.

    Typer's tracebacks would print local variables, and with them secrets.
    """
    common: dict[str, Any] = {
        "add_completion": False,
        "rich_markup_mode": None,
        "pretty_exceptions_enable": False,
        "no_args_is_help": True,
        "context_settings": {"help_option_names": ["-h", "--help"]},
    }
    return typer.Typer(**(common | options))
