"""`warmpath`, and `python -m gateway`."""

from __future__ import annotations

from gateway.cli import app


def main() -> None:
    app(prog_name="warmpath")


if __name__ == "__main__":
    main()
