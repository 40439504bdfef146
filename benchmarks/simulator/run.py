"""The router in the simulator, beside baseline strategies and one pooled cache, with bounds that its results must meet.

Chats come in an open loop at an uncached load of 0.75, to 4 and 8 deployments with caches of 1M to 4M tokens. Coding
agents come in a closed loop: 200 sessions starting every 20 s on average, at most 150 requests each, with think times
of at most 300 s, to 4 deployments with caches of 1M tokens and a prefill rate of 8,000 tokens per second; first all in
class batch, then every tenth in real-time. The traffic is generated, or recorded with `--recorded` if the recordings
are beside the repository. Everything runs in virtual time: only the CPU seconds depend on the machine.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from gateway.simulator import generate
from gateway.simulator.compare import (
    OURS,
    POOLED,
    STRATEGIES,
    StrategySummary,
    compare,
    prefill_rate_for_load,
)
from gateway.simulator.engine_steps import EngineSpeed
from gateway.simulator.plot import bar_chart
from gateway.simulator.site import SimulatedSite, default_policy
from gateway.simulator.traces import TrafficTrace, read_trace, staggered

HERE = Path(__file__).parent
SHARED = Path(os.environ.get("WARMPATH_SHARED", HERE.parents[2] / "shared")) / "traces"
LOAD = 0.75
AGENT_PREFILL_TOKENS_PER_SECOND = 8_000
BASELINES = [name for name in STRATEGIES if name not in (OURS, POOLED)]


def chats(trace: TrafficTrace, server_counts: Sequence[int], capacities: Sequence[int]) -> Iterator[dict[str, Any]]:
    for servers in server_counts:
        for capacity_tokens in capacities:
            rate = prefill_rate_for_load(trace, servers, LOAD)
            made = _run(trace, servers, capacity_tokens, rate)
            by_name = {summary.strategy: summary for summary in made["summaries"]}
            best = min(by_name[name].ttft_mean_seconds for name in BASELINES)
            yield _row(made, {
                "hit rate within 1.5 points of the pooled cache":
                    by_name[OURS].hit_rate >= by_name[POOLED].hit_rate - 0.015,
                "mean TTFT no worse than the best baseline": by_name[OURS].ttft_mean_seconds <= best,
                "no server above 1.3 times the mean load": by_name[OURS].load_ratio <= 1.3,
            })  # fmt: skip


def agents(trace: TrafficTrace, seed: int) -> Iterator[dict[str, Any]]:
    for urgent_every in (None, 10):
        traffic = staggered(trace, seed=seed, sessions=200, max_requests=150, urgent_every=urgent_every)
        made = _run(traffic, 4, 1_000_000, AGENT_PREFILL_TOKENS_PER_SECOND)
        by_name = {summary.strategy: summary for summary in made["summaries"]}
        ours = by_name[OURS]
        bars = {
            "hit rate at least 0.90": ours.hit_rate >= 0.90,
            "done before every baseline": ours.makespan_seconds < min(by_name[b].makespan_seconds for b in BASELINES),
            "no server above 1.3 times the mean load": ours.load_ratio <= 1.3,
        }
        if urgent_every:
            bars["real-time hit rate at least 0.90"] = (ours.urgent_hit_rate or 0) >= 0.90
            bars["real-time never held"] = ours.urgent_held == 0
        yield _row({**made, "real-time": f"one in {urgent_every}" if urgent_every else "none"}, bars)


def _run(trace: TrafficTrace, servers: int, capacity_tokens: int, rate: float) -> dict[str, Any]:
    started, cpu_started = time.perf_counter(), cpu_seconds()
    site = SimulatedSite(default_policy(servers), capacity_tokens, EngineSpeed.of_rate(rate))
    summaries = list(compare(trace, site, list(STRATEGIES), processes=os.cpu_count() or 1))
    return {
        "trace": trace.name, "requests": trace.requests, "servers": servers, "capacity_tokens": capacity_tokens,
        "prefill_tokens_per_second": round(rate), "cpu_seconds": round(cpu_seconds() - cpu_started, 1),
        "seconds": round(time.perf_counter() - started, 1),
        "summaries": summaries,
    }  # fmt: skip


def cpu_seconds() -> float:
    """CPU seconds of this process and of its children that have ended."""
    used = os.times()
    return used.user + used.system + used.children_user + used.children_system


def _row(made: dict[str, Any], bars: dict[str, bool]) -> dict[str, Any]:
    summaries: list[StrategySummary] = made.pop("summaries")
    title = f"{made['trace']}, {made['servers']} servers, caches of {made['capacity_tokens']:,} tokens"
    print(title, flush=True)
    for summary in summaries:
        print(
            f"  {summary.strategy:22} cached {summary.hit_rate:6.1%}  TTFT mean {summary.ttft_mean_seconds:8.2f} s  "
            f"p99 {summary.ttft_p99_seconds:8.2f} s  done after {summary.makespan_seconds / 60:5.0f} min  "
            f"busiest {summary.load_ratio:.2f} x mean"
        )
    for bar, holds in bars.items():
        print(f"  {'holds' if holds else 'FAILS'}: {bar}", flush=True)
    return {
        **made,
        "bars": bars,
        "strategies": [_rounded(summary) for summary in summaries],
        "chart": (title, summaries),
    }


def _rounded(summary: StrategySummary) -> dict[str, Any]:
    return {
        name: round(value, 4) if isinstance(value, float) else value
        for name, value in dataclasses.asdict(summary).items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recorded", action="store_true", help="replay the recordings, if they are present")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kind", choices=("chats", "agents"), help="run only this traffic")
    parser.add_argument(
        "--servers", type=int, action="append", help="number of deployments, for chats only; may be repeated"
    )
    parser.add_argument("--write", action="store_true", help=f"write the result and charts into {HERE.name}/results")
    arguments = parser.parse_args()
    if arguments.recorded and not SHARED.is_dir():
        raise SystemExit(f"no recordings in {SHARED.name}")
    rows: list[dict[str, Any]] = []
    if arguments.kind != "agents":
        trace = (
            read_trace(SHARED / "mooncake_conversation_trace.jsonl")
            if arguments.recorded
            else generate.conversation(arguments.seed)
        )
        rows += chats(trace, arguments.servers or (4, 8), (1_000_000, 2_000_000, 4_000_000))
    if arguments.kind != "chats":
        trace = (
            read_trace(SHARED / "claude_code_sessions.jsonl") if arguments.recorded else generate.agents(arguments.seed)
        )
        rows += agents(trace, arguments.seed)
    charts = [row.pop("chart") for row in rows]
    if arguments.write:
        kind = "-".join([arguments.kind or "all", *(f"{count}-servers" for count in arguments.servers or ())])
        name = f"{'recorded' if arguments.recorded else 'made-up'}-{kind}-seed-{arguments.seed}"
        folder = HERE / "results"
        folder.mkdir(exist_ok=True)
        (folder / f"{name}.json").write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
        for number, (title, summaries) in enumerate(charts):
            if number in (0, len(charts) - 1):
                (folder / f"{name}-{number}.svg").write_text(bar_chart(title, summaries), encoding="utf-8")


if __name__ == "__main__":
    main()
