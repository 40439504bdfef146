"""`warmpath completion`: prints the script with which a shell completes verbs, options and files."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer
from typer._completion_shared import get_completion_script

from gateway.cli.verb_app import verb_app

PROGRAM = "warmpath"


class Shell(StrEnum):
    """The shells that have a completion script."""

    BASH = "bash"
    ZSH = "zsh"
    FISH = "fish"


app = verb_app()


@app.command()
def completion(shell: Annotated[Shell, typer.Argument(help="The shell.")]) -> None:
    """Print the completion script of a shell.

    For bash: warmpath completion bash >> ~/.bashrc. For zsh: warmpath completion zsh >> ~/.zshrc. For fish: warmpath
    completion fish > ~/.config/fish/completions/warmpath.fish.
    """
    script = get_completion_script(prog_name=PROGRAM, complete_var=f"_{PROGRAM.upper()}_COMPLETE", shell=shell)  # nosec B604
    typer.echo(script)


__all__ = ["app"]
