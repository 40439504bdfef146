"""`warmpath simulate`: replays traffic in virtual time and compares routing strategies."""

from __future__ import annotations

import dataclasses
import os
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from gateway.cli.common import (
    AsJson,
    fail,
    policy_or_exit,
    print_json,
    print_line,
    print_stderr,
    print_table,
    usage_error,
    verb_app,
)
from gateway.policy import Policy
from gateway.policy.fields import parse_count
from gateway.routing.block_source import OVERHEAD_SECONDS
from gateway.server.policy_checks import ANYWHERE
from gateway.simulator import generate
from gateway.simulator.compare import STRATEGIES, StrategySummary, compare, prefill_rate_for_load
from gateway.simulator.engine_steps import EngineSpeed
from gateway.simulator.plot import bar_chart
from gateway.simulator.site import Reports, SimulatedSite, default_policy, policy_for
from gateway.simulator.suite import SuiteRow, run_suite
from gateway.simulator.traces import TraceError, TrafficTrace, read_trace, staggered
from gateway.simulator.workloads import RECIPES, Workload, make_workload, recorded_workload

app = verb_app()

DEFAULT_LOAD = 0.75
QUICK_SHARE = 0.1  # of a suite's requests
DEFAULT_PREFILL_TOKENS_PER_SECOND = 8_000


class Generator(Enum):
    """Kinds of generated traffic."""

    CONVERSATION = "conversation"
    AGENTS = "agents"


def _tokens(text: str) -> int:
    """Parse a count as in a policy: `64k`, `1.5M`."""
    with usage_error():
        count = parse_count(text)
    if not isinstance(count, int) or count < 1:
        raise typer.BadParameter("a count must be a whole number above 0")
    return count


@app.command()
def simulate(
    trace: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE",
            exists=True,
            dir_okay=False,
            help="Recorded traffic. Format: docs/explanation/routing.md. With --suite: another row; repeatable.",
        ),
    ] = None,
    generator: Annotated[
        Generator | None, typer.Option("--generate", help="Generate traffic instead of reading a trace.")
    ] = None,
    deployments: Annotated[int, typer.Option(metavar="N", min=1, max=1024, help="Number of deployments.")] = 4,
    capacity: Annotated[
        str, typer.Option(metavar="TOKENS", help="Tokens in the prefix cache of each deployment, as in 1M.")
    ] = "1M",
    policy: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            exists=True,
            dir_okay=False,
            help="Policy whose first deployment and model are simulated. Default: a minimal one.",
        ),
    ] = None,
    load: Annotated[
        float | None,
        typer.Option(
            metavar="SHARE",
            min=0.01,
            max=10,
            help="Open loop: share of its time that each deployment would need to prefill everything.",
        ),
    ] = None,
    prefill_rate: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Prefill speed of a deployment in tokens per second.")
    ] = None,
    sessions: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Closed loop: number of sessions from the trace.")
    ] = None,
    start_every: Annotated[
        float, typer.Option(metavar="SECONDS", min=0.001, help="Closed loop: seconds between session starts.")
    ] = 20.0,
    max_requests: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Closed loop: maximum requests per session.")
    ] = None,
    realtime_every: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Closed loop: one in N sessions is real-time, the others are batch."),
    ] = None,
    gateways: Annotated[
        int,
        typer.Option(
            metavar="N", min=1, max=64, help="Number of gateways, which take calls in turn and exchange their state."
        ),
    ] = 1,
    reports: Annotated[
        Reports,
        typer.Option(help="What deployments report of their caches: KV events and metrics, cached_tokens in replies."),
    ] = Reports.REPLIES,
    hints: Annotated[bool, typer.Option("--hints", help="Clients name their sessions (prompt_cache_key).")] = False,
    seed: Annotated[int, typer.Option(metavar="N", help="Random seed.")] = 1,
    only: Annotated[
        list[str] | None, typer.Option(metavar="STRATEGY", help="Simulate only this strategy. Repeatable.")
    ] = None,
    suite: Annotated[
        bool,
        typer.Option(
            "--suite",
            help="Replay many workloads and flag those on which the router loses. Only the options below apply.",
        ),
    ] = False,
    quick: Annotated[bool, typer.Option("--quick", help="With --suite: a tenth of the requests.")] = False,
    row: Annotated[
        list[str] | None, typer.Option(metavar="ROW", help="With --suite: simulate only this row. Repeatable.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", dir_okay=False, help="Also write a chart to this SVG file.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Replay traffic through the router in virtual time, and compare it with other strategies and one pooled cache.

    With --suite, only --trace, --row, --quick, --only, --seed and --json apply.

    Deployments compute prompts and answers in batches, step by step, and evict the least recently used blocks. The
    router knows only what it would know in a running gateway: it learns cache sizes and speeds from replies.
    """
    names = only or list(STRATEGIES)
    for name in names:
        if name not in STRATEGIES:
            fail(f"there is no strategy {name!r}; known: {', '.join(STRATEGIES)}")
    if suite:
        _run_suite(_workloads(trace or [], row, seed, QUICK_SHARE if quick else 1.0), names, as_json=as_json)
        return
    if quick or row:
        fail("--quick and --row need --suite")
    traffic = _traffic(trace or [], generator, seed)
    if traffic.closed_loop:
        traffic = staggered(
            traffic, seed=seed, sessions=sessions, start_every_seconds=start_every, max_requests=max_requests,
            urgent_every=realtime_every,
        )  # fmt: skip
    capacity_tokens = _capacity(capacity, traffic)
    speed = EngineSpeed.of_rate(rate := _rate(traffic, deployments, load, prefill_rate))
    simulated_policy = _policy(policy, deployments)
    if (loaded_per_second := simulated_policy.deployments[0].kv_transfer_tokens_per_second) is not None:
        speed = dataclasses.replace(speed, load=OVERHEAD_SECONDS, load_token=1 / loaded_per_second)
    site = SimulatedSite(simulated_policy, capacity_tokens, speed, reports=reports, gateways=gateways)
    summaries = _compared(traffic, site, names, hints=hints)
    title = (
        f"{traffic.name}: {traffic.requests} requests, {deployments} deployments, "
        f"caches of {capacity_tokens:,} tokens, {rate:,.0f} prompt tokens/s"
        + (f", {gateways} gateways" if gateways > 1 else "")
    )
    if plot is not None:
        plot.write_text(bar_chart(title, summaries), encoding="utf-8")
    if as_json:
        print_json(
            {"trace": traffic.name, "requests": traffic.requests, "deployments": deployments, "gateways": gateways,
             "capacity_tokens": capacity_tokens, "prefill_tokens_per_second": rate,
             "strategies": [dataclasses.asdict(summary) for summary in summaries]}
        )  # fmt: skip
        return
    print_line(title)
    print_line()
    _print_summaries(summaries)


def _capacity(text: str, traffic: TrafficTrace) -> int:
    """The size of each cache in tokens. Fails if a request would not fit."""
    tokens = _tokens(text)
    longest = max(
        request.prompt_tokens + request.output_tokens for session in traffic.sessions for request in session.requests
    )
    if longest > tokens:
        fail(f"--capacity: a request of {longest:,} tokens does not fit into {tokens:,}")
    return tokens


def _policy(path: Path | None, deployments: int) -> Policy:
    if path is None:
        return default_policy(deployments)
    given = policy_or_exit(path, checks=ANYWHERE)
    if any(deployment.role for deployment in given.deployments):
        print_stderr("`role` is ignored: each simulated deployment computes prompts and answers")
        without = tuple(deployment.model_copy(update={"role": None}) for deployment in given.deployments)
        given = given.model_copy(update={"deployments": without})
    return policy_for(given, deployments)


def _compared(traffic: TrafficTrace, site: SimulatedSite, names: list[str], *, hints: bool) -> list[StrategySummary]:
    """Simulate each strategy, and print to stderr which have ended."""
    summaries: list[StrategySummary] = []
    for summary in compare(traffic, site, names, hints=hints, processes=os.cpu_count() or 1):
        summaries.append(summary)
        print_stderr(f"{len(summaries)} of {len(names)}: {summary.strategy}", style="")
    return summaries


def _traffic(traces: list[Path], generator: Generator | None, seed: int) -> TrafficTrace:
    if len(traces) + (generator is not None) != 1:
        fail("set either --trace FILE or --generate conversation|agents")
    if generator is not None:
        return generate.conversation(seed) if generator is Generator.CONVERSATION else generate.agents(seed)
    return _read(traces[0])


def _read(path: Path) -> TrafficTrace:
    try:
        return read_trace(path)
    except TraceError as problem:
        fail(str(problem))


def _workloads(traces: list[Path], rows: list[str] | None, seed: int, share: float) -> list[Workload]:
    """The workloads with these names; all if None. Rows of traces have their files' names."""
    recorded = {path.name: path for path in traces}
    names = [*RECIPES, *recorded] if rows is None else rows
    for name in names:
        if name not in RECIPES and name not in recorded:
            fail(f"there is no row {name!r}; known: {', '.join([*RECIPES, *recorded])}")
    return [
        recorded_workload(name, _read(recorded[name]), seed, share)
        if name in recorded
        else make_workload(name, seed, share)
        for name in names
    ]


def _run_suite(workloads: list[Workload], names: list[str], *, as_json: bool) -> None:
    rows: list[SuiteRow] = []
    for row in run_suite(workloads, names, processes=os.cpu_count() or 1):
        rows.append(row)
        print_stderr(f"{len(rows)} of {len(workloads)}: {row.workload}", style="")
    if as_json:
        print_json(
            [
                {
                    "workload": row.workload,
                    "rho": row.rho,
                    "requests": row.requests,
                    "best": None if row.best is None else row.best.strategy,
                    "flags": list(row.flags),
                    "strategies": [dataclasses.asdict(summary) for summary in row.summaries],
                }
                for row in rows
            ]
        )
        return
    print_line("Mean TTFT and p99 in seconds, cached share of the prompt tokens, busiest deployment over the mean")
    print_line()
    print_table(
        ("WORKLOAD", "RHO", *(name.upper() for name in names), "FLAGS"),
        [
            (
                row.workload,
                f"{row.rho:.2f}",
                *(
                    f"{summary.ttft_mean_seconds:.2f} {summary.ttft_p99_seconds:.1f} "
                    f"{100 * summary.hit_rate:.0f}% {summary.load_ratio:.1f}"
                    for summary in row.summaries
                ),
                "; ".join(row.flags) or "-",
            )
            for row in rows
        ],
    )
    print_line()
    print_line(f"{sum(bool(row.flags) for row in rows)} of {len(rows)} rows are flagged")


def _rate(traffic: TrafficTrace, deployments: int, load: float | None, prefill_rate: int | None) -> float:
    if load is not None and (prefill_rate is not None or traffic.closed_loop):
        fail(
            "--load sets the prefill speed in an open loop; it cannot be combined with --prefill-rate or a closed loop"
        )
    if prefill_rate is not None or traffic.closed_loop:
        return float(prefill_rate or DEFAULT_PREFILL_TOKENS_PER_SECOND)
    return prefill_rate_for_load(traffic, deployments, DEFAULT_LOAD if load is None else load)


def _print_summaries(summaries: list[StrategySummary]) -> None:
    mixed = any(summary.urgent_hit_rate is not None for summary in summaries)
    columns = ("STRATEGY", "CACHED", "TTFT MEAN", "P50", "P99", "MAKESPAN", "MAX LOAD")
    print_table(
        (*columns, "REALTIME CACHED", "P99", "HELD") if mixed else columns,
        [
            (
                summary.strategy,
                f"{100 * summary.hit_rate:.1f} %",
                f"{summary.ttft_mean_seconds:.2f} s",
                f"{summary.ttft_p50_seconds:.2f} s",
                f"{summary.ttft_p99_seconds:.2f} s",
                f"{summary.makespan_seconds / 60:.0f} min",
                f"{summary.load_ratio:.2f} x mean",
                *(
                    (
                        f"{100 * (summary.urgent_hit_rate or 0):.1f} %",
                        f"{summary.urgent_ttft_p99_seconds or 0:.2f} s",
                        str(summary.urgent_held),
                    )
                    if mixed
                    else ()
                ),
            )
            for summary in summaries
        ],
    )


__all__ = ["app"]
