"""Compiles the libraries that the tests of the kernels load: every level of this CPU, and AMX with emulated tiles.

With `--highest` it compiles only this CPU's highest level, which is the one that tests need that are not slow.

Each is compiled once for all processes and runs of the tests: the levels into the user's cache, as the engine does, and
the emulated tiles into build/. Only the standard library is needed here: `python -m tests.backend.native.libraries`
compiles everything while the environment is still being installed.
"""

from __future__ import annotations

import logging
import os
import shutil
import sys
from pathlib import Path

from backend.native import compiler

HERE = Path(__file__).parent
EMULATED_AMX = HERE / "emulated_amx.cpp"
PARTS = tuple(sorted((compiler.SOURCES / "kernels" / "parts").glob("*.cpp")))
FLAGS = (
    *(flag for flag in compiler.FLAGS if flag not in ("-O3", "-fvisibility=hidden")),
    *compiler.LEVELS[-1].flags,
    *("-O1", "-include", str(HERE / "emulated_tiles.h")),  # -O3 takes three times as long
)
FOLDER = HERE.parents[2] / "build" / "tests"
LOWER_PRIORITY = 5
HIGHEST_ONLY = "--highest"


def compile_emulated_amx() -> Path:
    FOLDER.mkdir(parents=True, exist_ok=True)
    sources = (path for folder in (compiler.SOURCES, HERE) for kind in ("*.cpp", "*.h") for path in folder.rglob(kind))
    key = compiler.hash_of(sources, FLAGS)
    return compiler.compile_once(FOLDER / f"emulated-amx-{key}.so", (EMULATED_AMX, *PARTS), FLAGS, "emulated AMX")


def compiled(sources: tuple[Path, ...], folder: Path, *flags: str) -> Path:
    """A library of these sources, named after the first."""
    found = next(path for name in compiler.COMPILERS if (path := shutil.which(name)))
    made = folder / sources[0].with_suffix(".so").name
    compiler.build(found, sources, flags, made, "for a test")
    return made


def main() -> int:
    """Compiles everything. Without a compiler, it says so and succeeds, and the tests of the kernels are skipped."""
    os.nice(LOWER_PRIORITY)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    try:
        *lower, highest = [level.name for level in compiler.LEVELS[: compiler.best_level() + 1]]
        compiler.open_library(highest)  # the one that most tests use
        if HIGHEST_ONLY not in sys.argv[1:]:
            for name in reversed(lower):
                compiler.open_library(name)
            if "avx512" in (*lower, highest):
                compile_emulated_amx()
    except (compiler.BuildError, OSError) as error:
        print(f"the native kernels are not compiled: {error}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
