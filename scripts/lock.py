"""Writes the locks: every package that an installation gets, at the version of constraints.txt, with its hashes.

    make lock

`requirements-gateway.lock` is for the gateway alone, `requirements.lock` for gateway and engine. Both are valid on
every platform. Neither names a package index, so they work with a mirror.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

LOCKS: dict[str, list[str]] = {
    "requirements-gateway.lock": ["--extra", "oidc"],
    "requirements.lock": ["--extra", "engine", "--extra", "oidc"],
}
PYTHON = "3.11"  # the oldest that the project supports


def main() -> None:
    uv = Path(sys.executable).with_name("uv")
    for file, extras in LOCKS.items():
        subprocess.run(
            [
                str(uv), "pip", "compile", "pyproject.toml", *extras, "--constraint", "constraints.txt",
                "--output-file", file, "--generate-hashes", "--universal", "--python-version", PYTHON,
                "--no-emit-index-url", "--no-annotate", "--custom-compile-command", "make lock", "--quiet", "--upgrade",
            ],
            check=True, stdout=subprocess.DEVNULL,
        )  # fmt: skip
        print(f"{file}: {Path(file).read_text().count('==')} packages")


if __name__ == "__main__":
    main()
