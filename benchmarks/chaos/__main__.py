"""Everything at once: tenants, hostile servers and clients, kills, a full disk, clock steps and bursts.

    python -m benchmarks.chaos [--minutes 5] [--clients 12] [--seed 1] [--keep FOLDER] [--result FILE]

Two gateways share one Redis. Behind them are three bundled engines (`a`, `b` and `mortal`) and scripted servers that
misbehave, each in its own way. Innocent clients send well-formed calls of several tenants to all endpoints, and
hostile clients do what no client should. Meanwhile a schedule of faults, drawn from the printed seed, runs.

    run.py              starts everything, runs the load and the faults, heals, and stops
    calls.py            the innocent calls: what is sent, how a reply is read, and which endings are allowed
    hostile_clients.py  the other clients, and which replies they must get
    servers.py          the scripted servers, and the relay that reads the counts of the engine that is killed
    faults.py           the schedule, and how each fault is done
    machine.py          the disk that fills, and the clock that steps
    watch.py            memory and descriptors of the processes that live through the run
    findings.py         the checks at the end, and the table

At the end the ledgers equal the engines' own counts to the token, no innocent call was refused, memory and descriptors
are flat, and every refusal named its cause. If one of these does not hold, the exit status is 1.

An innocent call is well-formed, within its limits, and for a model that has a healthy deployment. It must end with a
whole answer. There are two exceptions. It may lose its connection if its gateway was killed meanwhile. And a gateway
whose disk is full refuses it with `ledger_unavailable`, and says so at /ready; the client then sends its
request to the other gateway, as a load balancer does, and that answer counts.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import platform
import subprocess
import tempfile
from datetime import UTC, datetime
from pathlib import Path

from benchmarks.chaos.machine import enter_namespace
from benchmarks.chaos.run import run


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.chaos",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--clients", type=int, default=12, help="innocent clients")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--keep", type=Path, help="an empty folder that keeps the logs")
    parser.add_argument("--result", type=Path, help="a file for the printed result")
    options = parser.parse_args()
    enter_namespace()
    logging.getLogger("asyncio").setLevel(logging.ERROR)  # not a line for each write to a server that has hung up
    print(f"seed {options.seed}", flush=True)
    with tempfile.TemporaryDirectory() as temporary:
        folder = (options.keep or Path(temporary)).absolute()
        findings = asyncio.run(run(folder, options.minutes * 60, options.clients, options.seed))
    lines = list(findings.lines())
    print("\n".join(lines))
    if options.result:
        machine = f"{platform.processor() or platform.machine()}, {os.cpu_count()} CPUs"
        commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
        title = f"benchmarks/chaos, {datetime.now(UTC):%Y-%m-%d}, commit {commit}: {machine}"
        options.result.write_text("\n".join([title, "", *lines, ""]))
    raise SystemExit(not findings.good)


if __name__ == "__main__":
    main()
