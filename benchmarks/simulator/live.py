"""How well the simulator predicts the live comparison of `benchmarks/warm_paths/peers.py`, and what it expects there.

    python -m benchmarks.simulator.live RESULTS.json ... [--timing CALIBRATION.json] [--processors 2]
    python -m benchmarks.simulator.live --predict RESULTS.json [--cells KIND:BLOCKS:CONCURRENCY ...] [--rounds 8]
        [--variations 1] [--transfers]

Simulates each run of a result of `peers.py`, with the same conversations, and prints both figures. With `--predict`,
simulates cells without measurements, by default all, and prints them as `peers.py` prints its own. The file has the
format of a result of `peers.py`. A later call continues it: runs that it has are not repeated. Prompts have the
tokens that the demo model's template and tokenizer give them, and the fingerprints that the gateway would compute. The
engines have the bundled engine's scheduler limits and block size, and the constants that `calibrate.py` has fitted on
the same machine; together with the router and the client they have `--processors` processors. The difference of a
figure is relative to the measured one; of cached shares it is in points.

With few conversations, a run is chaotic: if a step takes a little longer, another conversation comes first, and goes to
another engine. With `--variations`, each round is simulated so many times, with constants that differ by some
`VARIED_BY`, and with another order of the conversations that begin at once. A live run is one of these.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from backend.model_files import open_model_files
from backend.server.templates import ChatTemplate
from backend.server.tokenizer import load_codec
from benchmarks.simulator.calibrate import CALLS, STEPS
from benchmarks.simulator.calibrate import RESULTS as CALIBRATIONS
from benchmarks.warm_paths import peers
from benchmarks.warm_paths.conversations import BLOCK_TOKENS
from benchmarks.warm_paths.stack import DEMO_WEIGHTS, LOADED_TOKENS_PER_SECOND
from benchmarks.warm_paths.traffic import KINDS, Messages, Turns, traffic
from gateway.endpoints import ENDPOINTS
from gateway.policy import Policy
from gateway.prompts.canonicaliser import Canonicaliser
from gateway.simulator.compare import OURS, ROUND_ROBIN, STRATEGIES
from gateway.simulator.engine_steps import EngineSpeed
from gateway.simulator.replay import Replay, ReplayResult
from gateway.simulator.site import Reports, SimulatedSite, default_policy
from gateway.simulator.traces import EnginePrompt, TraceRequest, TraceSession, TrafficTrace
from gateway.types import Principal, Trace

ENGINES = 3
ANSWER_TOKENS = 16
ROUTERS = {
    "warmpath/events": (OURS, Reports.EVENTS),
    "warmpath/cached": (OURS, Reports.REPLIES),
    "warmpath/nothing": (OURS, Reports.NOTHING),
    "warmpath/round robin": (ROUND_ROBIN, Reports.REPLIES),
    "vllm-router": ("vllm-router", Reports.NOTHING),
    "sglang-router": ("sglang-router", Reports.NOTHING),
}
VARIED_BY = 0.12  # of each constant: the standard deviation of its logarithm
FIGURES = ("cached", "ttft_mean_ms", "ttft_p95_ms", "seconds", "busiest")


class PromptTokenizer:
    """Token ids of prompts, by the demo model's template and tokenizer. Tokenizes each prompt once."""

    def __init__(self) -> None:
        files = open_model_files(DEMO_WEIGHTS)
        self._codec = load_codec(files)
        self._template = ChatTemplate(files.chat_templates(), self._codec.special_tokens)
        self._known: dict[str, list[int]] = {}

    def ids_of(self, messages: list[dict[str, Any]]) -> list[int]:
        text = self._template.render(messages)
        if text not in self._known:
            self._known[text] = self._codec.encode(text, add_special_tokens=False)
        return self._known[text]


class TraceMaker:
    """Makes traces of conversations: what the gateway and the engines make of their messages."""

    def __init__(self) -> None:
        self._tokenizer = PromptTokenizer()
        self._canonicaliser = Canonicaliser(b"secret")
        self._policy = default_policy(1)
        self._principal = Principal(self._policy.tenants[0], "k")

    def trace(self, work: Sequence[Turns], concurrency: int) -> TrafficTrace:
        sessions = [
            TraceSession(turns.name, 0.0, [self._request(messages) for messages in turns.requests]) for turns in work
        ]
        return TrafficTrace("live", sessions, closed_loop=True, concurrency=concurrency, answers_repeat=False)

    def _request(self, messages: Messages) -> TraceRequest:
        body = {"model": self._policy.models[0].name, "messages": messages, "max_tokens": ANSWER_TOKENS}
        call = self._canonicaliser.canonicalise(
            ENDPOINTS[0], json.dumps(body).encode(), {}, call_id="c", now=0.0, policy=self._policy,
            principal=self._principal, trace=Trace(1, 0, False),
        )  # fmt: skip
        token_ids = self._tokenizer.ids_of(messages)
        blocks = tuple(range(block, block + 1) for block in call.fingerprint)
        prompt = EnginePrompt(len(token_ids), tuple(_block_hashes(token_ids)))
        return TraceRequest(0.0, call.prompt_tokens_estimate, ANSWER_TOKENS, blocks, prompt)


def _block_hashes(token_ids: Sequence[int]) -> Iterator[int]:
    block = 0
    for start in range(0, len(token_ids) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
        block = hash((block, tuple(token_ids[start : start + BLOCK_TOKENS])))
        yield block


def simulate(
    trace: TrafficTrace, router: str, cache_tokens: int, timing: EngineSpeed, processors: float, *, transfers: bool
) -> dict[str, float]:
    """The figures of `peers.py`, predicted."""
    strategy, reports = ROUTERS[router]
    site = SimulatedSite(
        _policy(transfers=transfers),
        cache_tokens,
        timing,
        reports=reports,
        block_tokens=BLOCK_TOKENS,
        processors=processors,
    )
    return _figures(Replay(trace, site, STRATEGIES[strategy], holds=strategy == OURS).run())


def _policy(*, transfers: bool) -> Policy:
    loads = {"provider": "warmpath", "kv_transfer_tokens_per_second": LOADED_TOKENS_PER_SECOND} if transfers else {}
    return default_policy(ENGINES, max_concurrency=64, **loads)


def _figures(result: ReplayResult) -> dict[str, float]:
    requests = result.requests
    ttfts = sorted(request.first_chunk - request.arrived for request in requests)
    computed = [engine.prompt_tokens - engine.cached_tokens for engine in result.engines]
    prompt_tokens = sum(request.prompt_tokens for request in requests)
    return {
        "cached": 1 - sum(computed) / prompt_tokens,
        "ttft_mean_ms": 1000 * statistics.fmean(ttfts),
        "ttft_p95_ms": 1000 * ttfts[int(0.95 * len(ttfts))],
        "seconds": max(request.finished for request in requests),
        "busiest": max(computed) / statistics.fmean(computed),
    }


@dataclass(frozen=True)
class Calibration:
    """Fitted constants: those of the engine, and by router those of calls."""

    timing: EngineSpeed
    routers: Mapping[str, Mapping[str, float]]

    def of(self, router: str, variation: int = 0) -> EngineSpeed:
        """The constants behind this router. Round robin costs what Warmpath's other rule costs."""
        calls: Mapping[str, Any] = self.routers.get(router) or self.routers.get(peers.OURS[1], {})
        return varied(replace(self.timing, **calls), variation)


def varied(timing: EngineSpeed, variation: int) -> EngineSpeed:
    """The constants, each changed at random. The variation 0 is unchanged."""
    if not variation:
        return timing
    rng = random.Random(variation)
    factors = {name: rng.lognormvariate(0, VARIED_BY) for name in (*STEPS, *CALLS)}
    return replace(timing, **{name: getattr(timing, name) * factor for name, factor in factors.items()})


def varied_order(trace: TrafficTrace, variation: int) -> TrafficTrace:
    """The trace with another order of the sessions that begin at once: which one comes first is chance."""
    if not variation or trace.concurrency is None:
        return trace
    sessions = list(trace.sessions)
    first = sessions[: trace.concurrency]
    random.Random(variation).shuffle(first)
    return replace(trace, sessions=[*first, *sessions[trace.concurrency :]])


def read_calibration(path: Path | None) -> Calibration:
    """The fitted constants; by default the newest ones."""
    found = json.loads((path or max(CALIBRATIONS.glob("calibration-*.json"))).read_text())
    return Calibration(EngineSpeed(**found["timing"]), found.get("routers", {}))


def compare_with(
    files: Sequence[Path], conversations: int, seed: int, calibration: Calibration, processors: float, variations: int
) -> None:
    """Simulate the runs of these files, and print for each cell and router what was predicted and what was measured.

    Both are means over the rounds. Behind the difference is the standard error that chaos allows: of the difference
    between one run and the mean of the variations in each round.
    """
    maker = TraceMaker()
    traces: dict[tuple[str, int, int], TrafficTrace] = {}
    compared: dict[tuple[Any, ...], list[tuple[dict[str, Any], list[dict[str, float]]]]] = {}
    for row in (row for path in files for row in json.loads(path.read_text())["runs"]):
        key = (row["kind"], row["concurrency"], row["round"])
        if key not in traces:
            work = traffic(row["kind"], conversations, seed + row["round"])
            traces[key] = maker.trace(work, row["concurrency"])
        made = [
            simulate(
                varied_order(traces[key], number),
                row["router"],
                row["cache_tokens"],
                calibration.of(row["router"], number),
                processors,
                transfers=row.get("transfers", False),
            )
            for number in range(variations)
        ]
        compared.setdefault((row["kind"], row["cache_tokens"], row["concurrency"], row["router"]), []).append(
            (row, made)
        )
    print(f"{'runs':44}" + "".join(f"{name:>30}" for name in FIGURES))
    differences: dict[str, list[float]] = {name: [] for name in FIGURES}
    for run, rounds in compared.items():
        cells = []
        for name in FIGURES:
            predicted, measured, error = _means(name, rounds)
            scale = 1.0 if name == "cached" else measured
            differences[name].append((predicted - measured) / scale)
            cells.append(f"{predicted:.4g} / {measured:.4g} ({differences[name][-1]:+.1%} ±{error / scale:.1%})")
        text = " ".join(map(str, run))
        print(f"{text:44}" + "".join(f"{cell:>30}" for cell in cells), flush=True)
    mean = "".join(f"{statistics.fmean(map(abs, found)):30.1%}" for found in differences.values())
    print(f"{'mean absolute difference':44}{mean}")


def _means(name: str, rounds: Sequence[tuple[Mapping[str, Any], Sequence[Mapping[str, float]]]]) -> tuple[float, ...]:
    """The mean of the predictions, that of the measurements, and the standard error of their difference."""
    made = [[one[name] for one in variations] for _, variations in rounds]
    variance = sum(statistics.variance(one) * (1 + 1 / len(one)) for one in made if len(one) > 1) / len(made) ** 2
    return (
        statistics.fmean(map(statistics.fmean, made)),
        statistics.fmean(row[name] for row, _ in rounds),
        variance**0.5,
    )


def predict(
    file: Path, cells: Sequence[peers.Cell], rounds: int, conversations: int, seed: int,
    calibration: Calibration, processors: float, variations: int = 1, *, transfers: bool = False,
) -> list[dict[str, Any]]:  # fmt: skip
    """Simulate the runs of these cells that the file does not have. Returns all runs of the file.

    Each variation of a round counts as a round of its own.
    """
    rows: list[dict[str, Any]] = json.loads(file.read_text())["runs"] if file.exists() else []
    done = {peers.run_of(row) for row in rows}
    maker = TraceMaker()
    for (kind, number), of_kind in itertools.groupby(
        sorted(itertools.product(cells, range(rounds)), key=lambda one: (KINDS.index(one[0].kind), one[1])),
        key=lambda one: (one[0].kind, one[1]),
    ):
        trace: TrafficTrace | None = None
        routers = (*peers.OURS, peers.VLLM, peers.SGLANG)
        for (cell, _), variation, router in itertools.product(of_kind, range(variations), routers):
            run = {"kind": kind, "cache_tokens": cell.blocks * BLOCK_TOKENS, "concurrency": cell.concurrency}
            run |= {"round": number * variations + variation, "router": router}
            if peers.run_of(run) in done:
                continue
            trace = trace or maker.trace(traffic(kind, conversations, seed + number), 1)
            of_cell = varied_order(replace(trace, concurrency=cell.concurrency), variation)
            timing = calibration.of(router, variation)
            loads = transfers and router in peers.OURS
            made = simulate(of_cell, router, cell.blocks * BLOCK_TOKENS, timing, processors, transfers=loads)
            rows.append(run | {"transfers": loads} | {name: round(value, 4) for name, value in made.items()})
            text = ",\n".join(map(json.dumps, rows))
            file.write_text(f'{{"simulated": true, "engines": {ENGINES}, "runs": [\n{text}\n]}}\n')
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, nargs="*", help="results of benchmarks.warm_paths.peers")
    parser.add_argument("--predict", type=Path, metavar="RESULTS", help="simulate cells, into this file")
    parser.add_argument("--cells", type=peers.read_cell, nargs="*", metavar="KIND:BLOCKS:CONCURRENCY", help="of these")
    parser.add_argument("--rounds", type=int, default=1, help="to predict, each with other conversations")
    parser.add_argument("--variations", type=int, default=1, help="of each round to predict, with other step times")
    parser.add_argument("--transfers", action="store_true", help="of cells to predict, as `peers.py` has it")
    parser.add_argument("--timing", type=Path, help="a result of benchmarks.simulator.calibrate; default: the newest")
    parser.add_argument("--processors", type=float, default=2.0, help="that the engines share")
    parser.add_argument("--conversations", type=int, default=12, help="as in the measured runs")
    parser.add_argument("--seed", type=int, default=1, help="as in the measured runs")
    args = parser.parse_args()
    calibration = read_calibration(args.timing)
    if args.predict is None:
        compare_with(args.results, args.conversations, args.seed, calibration, args.processors, args.variations)
        return
    cells = args.cells or [peers.Cell(*one) for one in itertools.product(KINDS, peers.BLOCKS, peers.CONCURRENCY)]
    rows = predict(
        args.predict, cells, args.rounds, args.conversations, args.seed, calibration, args.processors, args.variations,
        transfers=args.transfers,
    )  # fmt: skip
    print("\n".join(peers.summary(rows)))


if __name__ == "__main__":
    main()
