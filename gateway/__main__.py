"""`warmpath`, and `python -m gateway`."""

from __future__ import annotations

from gateway.cli import app
from gateway.core.private_files import make_new_files_private


def main() -> None:
    make_new_files_private()
    app(prog_name="warmpath")


if __name__ == "__main__":
    main()
