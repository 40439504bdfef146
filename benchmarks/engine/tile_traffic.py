"""Cache traffic of AMX products, counted on any CPU with AVX-512: `python -m benchmarks.engine.tile_traffic`.

Computes and times nothing. tile_traffic.cpp compiles the kernels with instructions that report their reads and writes
to a model of two caches, and prints the counts.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from backend.native import library
from backend.native.compiler import COMPILERS, LEVELS
from backend.native.compiler import FLAGS as KERNEL_FLAGS

SOURCE = Path(__file__).with_name("tile_traffic.cpp")
AMX = next(level for level in LEVELS if level.name == "amx")
FLAGS = (*(flag for flag in KERNEL_FLAGS if flag != "-O3"), *AMX.flags, "-O1")


def main() -> None:
    if (loaded := library.load()) is None or not {"avx512", "amx"} & {*loaded.level_names}:
        sys.exit("the AMX kernels need a compiler and AVX-512, which this CPU lacks")
    compiler = next(path for name in COMPILERS if (path := shutil.which(name)))
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "tile_traffic"
        subprocess.run([compiler, *FLAGS, str(SOURCE), "-o", str(program)], check=True)
        subprocess.run([str(program)], check=True)


if __name__ == "__main__":
    main()
