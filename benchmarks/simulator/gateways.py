"""Several gateways in front of the same deployments, in virtual time: what replica sync gains in cached tokens.

Chats come in an open loop, coding agents in a closed loop, generated or recorded (`--recorded`). The gateways take
calls in turn, so that the requests of one conversation spread over all of them.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from gateway.simulator import generate
from gateway.simulator.compare import OURS, compare, prefill_rate_for_load
from gateway.simulator.engine_steps import EngineSpeed
from gateway.simulator.site import SimulatedSite, default_policy
from gateway.simulator.traces import TrafficTrace, read_trace, staggered

HERE = Path(__file__).parent
SHARED = Path(os.environ.get("WARMPATH_SHARED", HERE.parents[2] / "shared")) / "traces"
SERVERS, CAPACITY_TOKENS = 4, 1_000_000
LOAD = 0.75
AGENT_PREFILL_TOKENS_PER_SECOND = 8_000
GATEWAYS = ((1, True), (2, True), (2, False))  # number of gateways, and whether they sync their estimates


def measure(trace: TrafficTrace, rate: float, kind: str) -> Iterator[dict[str, Any]]:
    site = SimulatedSite(default_policy(SERVERS), CAPACITY_TOKENS, EngineSpeed.of_rate(rate))
    for gateways, syncs in GATEWAYS:
        (made,) = compare(trace, replace(site, gateways=gateways, syncs=syncs), [OURS])
        row = {
            "traffic": kind, "requests": trace.requests, "gateways": gateways, "share": syncs,
            "hit_rate": round(made.hit_rate, 4),
            "realtime_hit_rate": None if made.urgent_hit_rate is None else round(made.urgent_hit_rate, 4),
            "ttft_mean_seconds": round(made.ttft_mean_seconds, 3), "makespan_seconds": round(made.makespan_seconds),
        }  # fmt: skip
        print(json.dumps(row), flush=True)
        yield row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recorded", action="store_true", help="replay the recordings, if they are present")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--write", action="store_true", help=f"write the result into {HERE.name}/results")
    arguments = parser.parse_args()
    seed = arguments.seed
    if arguments.recorded and not SHARED.is_dir():
        raise SystemExit(f"no recordings in {SHARED.name}")
    chats = generate.conversation(seed) if not arguments.recorded else read_trace(
        SHARED / "mooncake_conversation_trace.jsonl"
    )  # fmt: skip
    agents = generate.agents(seed) if not arguments.recorded else read_trace(SHARED / "claude_code_sessions.jsonl")
    rows = list(measure(chats, prefill_rate_for_load(chats, SERVERS, LOAD), "chats"))
    for urgent_every, kind in ((None, "agents, all batch"), (10, "agents, one in ten real-time")):
        traffic = staggered(agents, seed=seed, sessions=200, max_requests=150, urgent_every=urgent_every)
        rows += measure(traffic, AGENT_PREFILL_TOKENS_PER_SECOND, kind)
    if arguments.write:
        name = f"{'recorded' if arguments.recorded else 'made-up'}-gateways-seed-{seed}.json"
        (HERE / "results" / name).write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
