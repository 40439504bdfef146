"""`warmpath`, and `python -m gateway`."""

from __future__ import annotations

from typer._completion_classes import completion_init

from gateway.cli import app
from gateway.core.private_files import make_new_files_private


def main() -> None:
    make_new_files_private()
    completion_init()  # shells ask for completions through environment variables
    app(prog_name="warmpath")


if __name__ == "__main__":
    main()
