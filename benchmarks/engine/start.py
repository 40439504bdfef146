"""The start of the engine with the demo model, until its ready line: `python -m benchmarks.engine.start`.

Starts a process a few times, one after the other, with the kernels compiled before and the files in the page cache. The
figures are the wall time until the ready line and the process's CPU time until then, as the median. The wall time must
be below `MUST_SECONDS` on a quiet machine. On a busy machine, only the CPU time says something. Linux only.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from datetime import UTC, datetime
from importlib.util import cache_from_source, find_spec
from pathlib import Path

from backend.native import compiler
from benchmarks.engine.cpu import cpu_name

MUST_SECONDS = 1.5
PACKAGES = ("torch", "numpy", "starlette", "tokenizers")
COMMAND = [sys.executable, "-m", "backend", "--model", "demo", "--port", "0"]
TICKS = os.sysconf("SC_CLK_TCK")
USER, SYSTEM = 13, 14  # fields of /proc/PID/stat


def main() -> None:
    parser = argparse.ArgumentParser(description="The start of the engine with the demo model.")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--result", type=Path, help="a file for the figures")
    args = parser.parse_args()
    if not compiler.is_compiled():
        sys.exit("the kernels are not compiled: run `make install`, or start the engine once")
    if without := [name for name in PACKAGES if not has_bytecode(name)]:
        sys.exit(f"no bytecode of {', '.join(without)}: run `python -m compileall` on the installed packages")
    print(machine := f"{cpu_name()}, Python {platform.python_version()}, load average {os.getloadavg()[0]:.1f}")
    rounds = [start() for _ in range(args.rounds + 1)][1:]  # the first one fills the page cache
    wall, cpu = (statistics.median(found[i] for found in rounds) for i in (0, 1))
    print(f"ready after {wall:.2f} s and {cpu:.2f} s of CPU time")
    print(f"below {MUST_SECONDS} s: {'holds' if wall < MUST_SECONDS else 'FAILS'}")
    if args.result:
        figures = {"wall_seconds": wall, "cpu_seconds": cpu}
        result = {"machine": machine, "date": datetime.now(UTC).date().isoformat(), "figures": figures}
        args.result.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def has_bytecode(package: str) -> bool:
    """Whether the package is compiled to bytecode. Otherwise its import takes several times as long."""
    found = find_spec(package)
    return found is not None and found.origin is not None and Path(cache_from_source(found.origin)).is_file()


def start() -> tuple[float, float]:
    """One start: wall seconds until the ready line, and CPU seconds until then."""
    began = time.monotonic()
    with subprocess.Popen(COMMAND, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        wall = time.monotonic() - began
        fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
        process.terminate()
    assert line.startswith("engine ready"), line
    first = USER - 2  # two fields are before the last parenthesis
    return wall, sum(int(fields[i]) for i in (first, first + SYSTEM - USER)) / TICKS


if __name__ == "__main__":
    main()
