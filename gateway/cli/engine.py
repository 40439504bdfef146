"""`warmpath engine`: runs the bundled engine as its own process. The gateway talks to it over HTTP only."""

from __future__ import annotations

import importlib.util
import os
import sys
from typing import Annotated

import typer

from gateway.cli.common import MISUSE, fail, verb_app

app = verb_app()


@app.command(
    no_args_is_help=False,
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
)
def engine(
    context: typer.Context,
    model: Annotated[
        str, typer.Option(help="Hugging Face model directory, model id on the Hub, or demo.", metavar="DIR|ID|demo")
    ] = "demo",
    port: Annotated[
        int, typer.Option(metavar="PORT", min=0, max=65535, help="Port to listen on. 0: any free port.")
    ] = 8081,
) -> None:
    """Serve a model with the bundled engine, OpenAI-compatible.

    Needs the extra `engine`: pip install 'warmpath[engine]'. Further options are passed to the engine unchanged.
    `python -m backend --help` lists them.
    """
    if importlib.util.find_spec("torch") is None:
        fail("the engine is not installed: pip install 'warmpath[engine]'", code=MISUSE)
    command = [sys.executable, "-m", "backend", "--model", model, "--port", str(port), *context.args]
    os.execv(sys.executable, command)  # replaces this process: the engine receives signals and sets the exit code


__all__ = ["app"]
