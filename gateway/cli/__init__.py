"""The `warmpath` command. Each verb is a module in this package, imported only when the verb is used.

A verb's module has an `app` made by `verb_app()`, with one command or with subcommands. All verbs have the same exit
codes: 0 success, 1 a problem was found, 2 wrong usage. Results go to stdout, everything else to stderr. Verbs whose
results scripts may read have `--json`.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib
from collections.abc import Iterator
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

from gateway import __version__
from gateway.cli.verb_app import verb_app

# In the order of the help. What `warmpath --help` says of each stands here, so that no verb is imported for it.
VERBS = {
    "up": "Start the bundled engine and the gateway.",
    "serve": "Run the gateway until it is stopped.",
    "engine": "Serve a model with the bundled engine, OpenAI-compatible.",
    "check": "Check a policy file and summarise it.",
    "explain": "Explain how the gateway would handle a request.",
    "simulate": "Replay traffic through the router in virtual time.",
    "batch": "Run files of requests in batch.",
    "keys": "Create, list, rotate and revoke API keys.",
    "tenants": "Create, list, change, delete, export and import tenants.",
    "admin-keys": "Create, list and revoke keys of the admin API.",
    "audit": "Show and verify the audit log.",
    "usage": "Sum up the ledger.",
    "import": "Convert another gateway's configuration to a policy.",
    "prices": "Import, compare and check prices.",
    "doctor": "Rank the causes of broken prefixes.",
    "status": "Show the health of a running gateway and its deployments.",
    "trace": "Show where the time of a request went.",
    "top": "Watch deployments, tenants, queues and recent requests live.",
    "route-log": "Show routing decisions.",
    "completion": "Print the completion script of a shell.",
}


_MODULES = {"import": "import_config"}  # of verbs whose name is a keyword


class _Verbs(TyperGroup):
    _is_listing = False

    def list_commands(self, ctx: Any) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in VERBS:
            return None
        if self._is_listing:
            return TyperCommand(cmd_name, help=VERBS[cmd_name])
        module = _MODULES.get(cmd_name, cmd_name.replace("-", "_"))
        return get_command(importlib.import_module(f"gateway.cli.{module}").app)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and args[0] not in VERBS and not args[0].startswith("-"):
            close = difflib.get_close_matches(args[0], VERBS, n=1)
            ctx.fail(f"No such command {args[0]!r}." + (f" Did you mean {close[0]!r}?" if close else ""))
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        with self._listing():
            super().format_commands(ctx, formatter)

    def shell_complete(self, ctx: Any, incomplete: str) -> Any:
        with self._listing():
            return super().shell_complete(ctx, incomplete)

    @contextlib.contextmanager
    def _listing(self) -> Iterator[None]:
        """Only names and help of the verbs are needed in the block, so they are not imported."""
        self._is_listing = True
        try:
            yield
        finally:
            self._is_listing = False


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
