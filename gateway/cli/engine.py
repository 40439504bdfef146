"""`warmpath engine`: the bundled engine, as a process of its own. The gateway knows it over HTTP only."""

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
        str, typer.Option(help="A Hugging Face model directory, a model id on the Hub, or demo.", metavar="DIR|ID|demo")
    ] = "demo",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes any free one.")] = 8081,
) -> None:
    """Serve a model with the bundled engine, OpenAI-compatible.

    Needs the engine's extra: pip install 'warmpath[engine]'. Further options are the engine's own, and passed on as
    they are; `python -m backend --help` lists them.
    """
    if importlib.util.find_spec("torch") is None:
        fail("the engine is not installed: pip install 'warmpath[engine]'", code=MISUSE)
    command = [sys.executable, "-m", "backend", "--model", model, "--port", str(port), *context.args]
    os.execv(sys.executable, command)  # signals and the exit code are the engine's from here on


__all__ = ["app"]
