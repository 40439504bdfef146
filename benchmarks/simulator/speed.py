"""Run time of the simulator for 48,000 requests of coding agents, with all strategies in parallel.

The bound is two minutes. The strategies run in as many processes as there are CPUs.
"""

from __future__ import annotations

import argparse
import json
import os
import time

from gateway.simulator import generate
from gateway.simulator.compare import STRATEGIES, compare
from gateway.simulator.engine_steps import EngineSpeed
from gateway.simulator.site import SimulatedSite, default_policy
from gateway.simulator.traces import staggered

REQUESTS = 48_000
REQUESTS_PER_SESSION = 53  # approximately
LIMIT_SECONDS = 120.0
PREFILL_TOKENS_PER_SECOND = 8_000


def cpu_seconds() -> float:
    """CPU seconds of this process and of its children that have ended."""
    used = os.times()
    return used.user + used.system + used.children_user + used.children_system


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=REQUESTS)
    arguments = parser.parse_args()
    made = generate.agents(1, sessions=max(1, arguments.requests // REQUESTS_PER_SESSION))
    trace, policy = staggered(made, seed=1), default_policy(4)
    site = SimulatedSite(policy, 1_000_000, EngineSpeed.of_rate(PREFILL_TOKENS_PER_SECOND))
    started, cpu_started = time.perf_counter(), cpu_seconds()
    for summary in compare(trace, site, list(STRATEGIES), processes=os.cpu_count() or 1):
        print(f"{summary.strategy:22} cached {summary.hit_rate:6.1%}", flush=True)
    print(json.dumps({
        "requests": trace.requests, "strategies": len(STRATEGIES), "seconds": round(time.perf_counter() - started, 1),
        "limit_seconds": LIMIT_SECONDS, "cpu_seconds": round(cpu_seconds() - cpu_started, 1),
    }))  # fmt: skip


if __name__ == "__main__":
    main()
