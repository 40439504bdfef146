"""Thousands of calls to deployments with random faults, and a check of the result of each.

    python -m benchmarks.faults [--calls 20000] [--seed 1] [--result FILE]

`tests/e2e/faults/schedules.py` draws the faults and defines the correct result of each call. The test beside it makes
two thousand calls of one schedule. Each round here starts its own upstreams and its own gateway, with another seed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import tempfile
import time
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path

from rich.progress import track

from tests.e2e.faults.schedules import check_all, gateway_with_faulty_deployments, send_requests

CALLS_PER_ROUND = 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--result", type=Path)
    options = parser.parse_args()
    began, ends, lost = time.monotonic(), Counter[str](), 0
    rounds = -(-options.calls // CALLS_PER_ROUND)
    for seed in track(range(options.seed, options.seed + rounds), description="rounds"):
        with tempfile.TemporaryDirectory() as folder, gateway_with_faulty_deployments(Path(folder), seed) as front:
            answers = asyncio.run(send_requests(front, CALLS_PER_ROUND))
            ends += check_all(front, answers)
            lost += CALLS_PER_ROUND - len(answers)
    assert not lost
    seconds = time.monotonic() - began
    text = f"{ends.total()} calls in {seconds:.0f} s, all results correct: {dict(ends.most_common())}"
    print(text)
    if options.result is not None:
        when = datetime.now(UTC).isoformat(timespec="seconds")
        machine = f"{platform.processor() or platform.machine()}, {os.cpu_count()} CPUs"
        known = {"when": when, "machine": machine, "seed": options.seed, "ends": dict(ends.most_common())}
        options.result.write_text(json.dumps(known) + "\n")


if __name__ == "__main__":
    main()
