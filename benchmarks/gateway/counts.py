"""What a request costs in instructions and in calls, without sockets: `python -m benchmarks.gateway.counts`.

Times depend on the machine and on its other load; these counts hardly do. The gateway is `in_process.py`'s.

* Instructions are counted by valgrind's callgrind, in all threads, with the interpreter, the C extensions and the event
  loop. They depend a little on the builds of Python and of the C library.
* Calls are those of Python functions and of C functions from Python, counted by `sys.setprofile`. They are the same on
  every machine.

The figures: a JSON request, untraced and traced; a stream without its chunks; one event of a stream that arrives alone,
and one of `EVENTS_PER_READ` that arrive together, as they do if the gateway lags behind its deployments.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from benchmarks.gateway.in_process import Ask, Load, json_load, run, stream_load

ROOT = Path(__file__).parents[2]
WARM_UP, REQUESTS = 30, 50
READS, EVENTS_PER_READ = 64, 8
VALGRIND_SECONDS = 900.0
LOADS = {
    "JSON request": json_load(),
    "JSON request, traced": json_load(traced=True),
    "stream": stream_load(0),
    "chunks": stream_load(READS),
    "joined": stream_load(READS, EVENTS_PER_READ),
}
# Callgrind writes its counts whenever this C function is entered. Nothing else calls it.
MARK: tuple[str, Callable[[], object]] = ("getloadavg", os.getloadavg)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--marked", action="store_true", help="only send the requests, with marks for callgrind")
    options = parser.parse_args()
    if options.marked:
        # Until here callgrind has counted nothing, so the imports took a quarter of the time.
        subprocess.run(["callgrind_control", "-i", "on", str(os.getpid())], check=True, stdout=subprocess.DEVNULL)
        run(_with_marks)
    else:
        print(report())


def report() -> str:
    """Both counts as a table. Takes a minute or two if valgrind is installed."""
    calls, instructions = count_calls(), count_instructions()
    lines = [f"{'':24} {'instructions':>12} {'calls':>8}"]
    for name in calls:
        counted = "" if instructions is None else f"{instructions[name]:,.0f}"
        lines.append(f"{name:24} {counted:>12} {calls[name]:8,.1f}")
    if instructions is None:
        lines.append("(valgrind is not installed: no instructions were counted)")
    return "\n".join(lines)


def count_calls() -> dict[str, float]:
    """Calls of Python and C functions for each figure: the median request."""
    counts: dict[str, float] = {}
    seen = 0

    def count(frame: FrameType, event: str, _: Any) -> None:
        nonlocal seen
        seen += event in ("call", "c_call")

    async def work(ask: Ask) -> None:
        nonlocal seen
        for name, load in LOADS.items():
            each: list[int] = []
            for _ in range(WARM_UP + REQUESTS):
                seen = 0
                sys.setprofile(count)
                await ask(load)
                sys.setprofile(None)
                each.append(seen)
            counts[name] = statistics.median(each[WARM_UP:])

    run(work)
    return _figures(counts)


def count_instructions() -> dict[str, float] | None:
    """Instructions for each figure: the mean over `REQUESTS`. None without valgrind."""
    if shutil.which("valgrind") is None:
        return None
    with tempfile.TemporaryDirectory() as folder:
        command = [
            "valgrind", "-q", "--tool=callgrind", "--instr-atstart=no", f"--dump-before={MARK[0]}",
            f"--callgrind-out-file={folder}/counts",
            sys.executable, "-m", "benchmarks.gateway.counts", "--marked",
        ]  # fmt: skip
        environment = {**os.environ, "PYTHONHASHSEED": "0"}
        done = subprocess.run(
            command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True, timeout=VALGRIND_SECONDS
        )
        if done.returncode:
            raise SystemExit(f"valgrind failed: {done.stderr[-2000:]}")
        # Part n has the instructions before mark n; each load has a mark before and one after its requests.
        parts = [_total(Path(folder) / f"counts.{2 * number}") for number in range(1, len(LOADS) + 1)]
    return _figures({name: total / REQUESTS for name, total in zip(LOADS, parts, strict=True)})


def _total(part: Path) -> int:
    found = re.search(r"^(?:totals|summary): (\d+)", part.read_text(), re.MULTILINE)
    assert found is not None, part
    return int(found[1])


def _figures(counts: dict[str, float]) -> dict[str, float]:
    without = counts["stream"]
    return {
        **{name: counts[name] for name in ("JSON request", "JSON request, traced", "stream")},
        "event, alone": (counts["chunks"] - without) / READS,
        "event, joined": (counts["joined"] - without) / (READS * EVENTS_PER_READ),
    }


async def _with_marks(ask: Ask) -> None:
    _, mark = MARK
    for load in LOADS.values():
        await _send(ask, load, WARM_UP)
        mark()
        await _send(ask, load, REQUESTS)
        mark()


async def _send(ask: Ask, load: Load, requests: int) -> None:
    for _ in range(requests):
        await ask(load)


if __name__ == "__main__":
    main()
