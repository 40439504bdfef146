"""Compiles relay.c into the folder `compiled`, when Warmpath is installed or its wheel is built, and finds the library.

The file's name contains a hash of source and flags, so a library of another source is never loaded. A gateway never
compiles: without the library, it relays streams in Python.

Only the standard library is needed here, because the build of a wheel runs this file (hatch_build.py).
`python -m gateway.providers.native_relay.compiler` fills `compiled/`.
"""

from __future__ import annotations

import hashlib
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

SOURCE = Path(__file__).with_name("relay.c")
INSTALLED = SOURCE.with_name("compiled")
COMPILERS = ("cc", "gcc", "clang")
FLAGS = (
    "-std=c11",
    "-D_GNU_SOURCE",
    "-O2",
    "-fPIC",
    "-shared",
    "-pthread",
    "-fvisibility=hidden",
    "-Wall",
    "-Wextra",
    "-Werror",
)
COMPILER_SECONDS = 60.0  # time limit; it takes 0.2 s


class CompileError(Exception):
    """The relay could not be compiled."""


def library_file() -> Path:
    """The file of the compiled relay, which may not exist."""
    key = hashlib.sha256(SOURCE.read_bytes() + repr(FLAGS).encode()).hexdigest()[:20]
    return INSTALLED / f"relay-{platform.system()}-{platform.machine()}-{key}.so".lower()


def compile_relay(folder: Path = INSTALLED, compilers: tuple[str, ...] = COMPILERS) -> Path:
    """Compile the relay into a folder, unless it is there, and return its file. Raises `CompileError` and `OSError`."""
    made = folder / library_file().name
    if made.exists():
        return made
    if not sys.platform.startswith("linux"):
        raise CompileError("it needs Linux")
    compiler = next((path for one in compilers if (path := shutil.which(one))), None)
    if compiler is None:
        raise CompileError(f"no C compiler ({', '.join(compilers)})")
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as building:
        linked = Path(building) / made.name
        try:
            command = [compiler, *FLAGS, str(SOURCE), "-o", str(linked)]
            subprocess.run(command, capture_output=True, text=True, timeout=COMPILER_SECONDS, check=True)
        except subprocess.SubprocessError as error:
            output = error.stderr if isinstance(error, subprocess.CalledProcessError) else str(error)
            raise CompileError(f"{compiler} failed: {output.strip()}") from None
        linked.replace(made)
    for other in folder.glob("relay-*.so"):  # of other sources
        if other != made:
            other.unlink(missing_ok=True)
    return made


def main() -> int:
    """Fill `compiled/`. Without a compiler, says so and succeeds: streams are then relayed in Python."""
    try:
        compile_relay()
    except (CompileError, OSError) as error:
        print(f"streams will be relayed in Python, for about twice the CPU time: the relay is not compiled: {error}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
