"""`warmpath simulate --suite` over several seeds, one replay after the other, with results that a later call continues.

    python -m benchmarks.simulator.suite --out RESULTS.json [--traces FOLDER ...] [--seeds 1 2 3] [--strategies ...]
    python -m benchmarks.simulator.suite --strategies warmpath --reuse OLD.json --out RESULTS.json
    python -m benchmarks.simulator.suite --summary RESULTS.json ...

A row's workload is replayed with each seed through each strategy. The file of results is written after each replay, and
replays that it has are not repeated. `--traces` names recordings, or folders of them; each is another row. The other
strategies do not change with the gateway's rule, so only the gateway's own need be replayed after a change: `--reuse`
takes the results of the strategies that are not replayed from an earlier file. `--summary` joins several files, of
which later ones replace what earlier ones have.

The summary has a line for each row and seed: the gateway's rule beside the best of the others, round robin and the
pooled cache, and what the suite flags (`gateway/simulator/suite.py`).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from gateway.simulator.compare import OURS, POOLED, ROUND_ROBIN, STRATEGIES, StrategySummary, replay_strategy
from gateway.simulator.suite import SuiteRow
from gateway.simulator.traces import TraceError, read_trace
from gateway.simulator.workloads import RECIPES, Workload, make_workload, recorded_workload

Key = tuple[str, int]  # row and seed
COLUMNS = f"{'row':34} {'seed':>4}  {'mean':>7} {'/best':>5} {'/rr':>5}  {'p99':>7} {'/best':>5} {'/rr':>5}  "
COLUMNS += f"{'cached':>6} {'pooled':>6} {'busiest':>7}  best strategy, flags"


class Results:
    """Results of replays by row and seed, kept in a file."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self.rows: dict[Key, dict[str, Any]] = {}
        if file.exists():
            self.rows = {(row["workload"], row["seed"]): row for row in json.loads(file.read_text())}

    def has(self, key: Key, strategy: str) -> bool:
        return any(one["strategy"] == strategy for one in self.rows.get(key, {}).get("strategies", ()))

    def reuse(self, earlier: Results, replayed: Sequence[str]) -> None:
        """Take over what is missing of `earlier`, except of the strategies that are to be replayed."""
        for key, row in earlier.rows.items():
            known = self.rows.setdefault(key, row | {"strategies": []})
            known["strategies"] += [
                one
                for one in row["strategies"]
                if one["strategy"] not in replayed and not self.has(key, one["strategy"])
            ]

    def add(self, workload: Workload, seed: int, summary: StrategySummary) -> None:
        """Note a replay, and write the file."""
        row = self.rows.setdefault((workload.name, seed), _row(workload, seed))
        row["strategies"].append(dataclasses.asdict(summary))
        row["strategies"].sort(key=lambda one: [*STRATEGIES].index(one["strategy"]))
        text = ",\n".join(json.dumps(row) for row in self.rows.values())
        unfinished = self._file.with_suffix(".tmp")
        unfinished.write_text(f"[\n{text}\n]\n")
        unfinished.replace(self._file)


def _row(workload: Workload, seed: int) -> dict[str, Any]:
    is_batch = not any(session.urgent for session in workload.trace.sessions)
    return {
        "workload": workload.name, "seed": seed, "rho": workload.rho, "requests": workload.trace.requests,
        "is_batch": is_batch, "strategies": [],
    }  # fmt: skip


def recordings(places: Sequence[Path]) -> dict[str, Path]:
    """Recorded traffic by file name: these files, and those in these folders."""
    files = [file for place in places for file in (sorted(place.glob("*.json*")) if place.is_dir() else [place])]
    return {file.name: file for file in files}


def workloads(names: Sequence[str], traces: dict[str, Path], seed: int) -> Iterator[Workload]:
    """The workloads of these rows. A recording that cannot be read is skipped, and named."""
    for name in names:
        if name not in traces:
            yield make_workload(name, seed)
            continue
        try:
            yield recorded_workload(name, read_trace(traces[name]), seed)
        except TraceError as problem:
            print(f"{name}: {problem}", flush=True)


def joined(files: Sequence[Path]) -> list[tuple[int, SuiteRow]]:
    """The rows of several files, with their seeds. Later files replace strategies of earlier ones."""
    rows: dict[Key, dict[str, Any]] = {}
    for file in files:
        for key, row in Results(file).rows.items():
            known = rows.setdefault(key, row | {"strategies": []})
            new = {one["strategy"] for one in row["strategies"]}
            known["strategies"] = [one for one in known["strategies"] if one["strategy"] not in new]
            known["strategies"] += row["strategies"]
    return [(seed, _suite_row(row)) for (_, seed), row in rows.items()]


def _suite_row(row: dict[str, Any]) -> SuiteRow:
    summaries = tuple(StrategySummary(**one) for one in row["strategies"])
    return SuiteRow(row["workload"], row["rho"], row["requests"], row["is_batch"], summaries)


def summary(rows: Sequence[tuple[int, SuiteRow]]) -> Iterator[str]:
    """A line for each row and seed that has results of the gateway's rule."""
    yield COLUMNS
    flagged = judged = 0
    for seed, row in rows:
        by_name = {one.strategy: one for one in row.summaries}
        others = [one for one in row.summaries if one.strategy not in (OURS, POOLED)]
        if OURS not in by_name or not others:
            continue
        judged += 1
        flagged += bool(row.flags)
        ours = by_name[OURS]
        best = min(others, key=lambda one: one.makespan_seconds if row.is_batch else one.ttft_mean_seconds)
        base, pooled = by_name.get(ROUND_ROBIN, best), by_name.get(POOLED)
        seconds = [one.makespan_seconds if row.is_batch else one.ttft_mean_seconds for one in (ours, best, base)]
        p99 = min(one.ttft_p99_seconds for one in others)
        yield (
            f"{row.workload:34} {seed:4}  {seconds[0]:7.2f} {_quotient(seconds[0], seconds[1])} "
            f"{_quotient(seconds[0], seconds[2])}  {ours.ttft_p99_seconds:7.1f} "
            f"{_quotient(ours.ttft_p99_seconds, p99)} {_quotient(ours.ttft_p99_seconds, base.ttft_p99_seconds)}  "
            f"{100 * ours.hit_rate:6.1f} {100 * pooled.hit_rate if pooled else float('nan'):6.1f} "
            f"{ours.load_ratio:7.2f}  {best.strategy}; {', '.join(row.flags) or '-'}"
        )
    yield f"{flagged} of {judged} are flagged"


def _quotient(seconds: float, other: float) -> str:
    return f"{seconds / other:5.2f}" if other > 0 else f"{'-':>5}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="file for the results; replays that it has are not repeated")
    parser.add_argument("--summary", type=Path, nargs="+", metavar="RESULTS", help="only summarise such files")
    parser.add_argument("--traces", type=Path, nargs="*", default=[], help="recordings, or folders of them")
    parser.add_argument("--reuse", type=Path, help="results whose other strategies are taken over into --out")
    parser.add_argument("--rows", nargs="*", help="of the suite, or files' names; default: all")
    parser.add_argument("--seeds", type=int, nargs="*", default=[1, 2, 3])
    parser.add_argument("--strategies", nargs="*", default=list(STRATEGIES), choices=STRATEGIES)
    args = parser.parse_args()
    if args.summary:
        print("\n".join(summary(joined(args.summary))))
        return
    if args.out is None:
        parser.error("--out or --summary is needed")
    results, traces = Results(args.out), recordings(args.traces)
    if args.reuse is not None:
        results.reuse(Results(args.reuse), args.strategies)
    names = args.rows or [*RECIPES, *traces]
    for seed in args.seeds:
        for workload in workloads(names, traces, seed):
            for strategy in args.strategies:
                if not results.has((workload.name, seed), strategy):
                    began = time.process_time()
                    results.add(workload, seed, replay_strategy(workload.trace, workload.site, strategy))
                    spent = time.process_time() - began
                    print(f"{workload.name}, seed {seed}: {strategy}, {spent:.1f} s of CPU", flush=True)


if __name__ == "__main__":
    main()
