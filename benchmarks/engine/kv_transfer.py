"""When it pays to load a prompt's blocks from another engine: `python -m benchmarks.engine.kv_transfer`.

Two engines on this machine serve one checkpoint of random weights, and exchange blocks over the loopback interface.
Each round measures the seconds to the first token of new prompts, over HTTP, in four ways:

    computed    the engine computes the prompt
    loaded      the other engine has the prompt's blocks, and is idle
    loaded from busy    the same while the other engine computes other prompts
    cached      the engine has the blocks itself

The last token of a prompt and its last, incomplete block are always computed. Then the gaps between two chunks of
another stream are measured, as the 99th percentile:

    alone       without other requests
    computing   while the engine computes prompts of the largest length
    loading     while the engine loads such prompts
    serving     at the other engine, while it serves the blocks of such prompts

All figures are medians of the rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx2

from benchmarks.engine.cpu import cpu_name
from benchmarks.engine.peers import CONTEXT_TOKENS, Load, ours, servable
from benchmarks.engine.shapes import SHAPES

STREAM_TOKENS, SHORT_PROMPT = 2000, 64
STREAM_START_SECONDS = 0.5
PROMPTS_BESIDE = 2  # during which the gaps of a stream are measured
ALONE_SECONDS = 2.0
COMPUTED, LOADED, FROM_BUSY, CACHED = "computed", "loaded", "loaded from busy", "cached"
BUSY_PROMPT = 2048


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=[*SHAPES], default="tiny")
    parser.add_argument("--tokens", type=int, nargs="+", default=[64, 256, 1024, 3072], help="lengths of the prompts")
    parser.add_argument("--threads", type=int, default=max(1, (os.cpu_count() or 2) // 2), help="of each engine")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--result", type=Path, help="a file for the figures")
    args = parser.parse_args()
    assert max(args.tokens) < CONTEXT_TOKENS, f"a prompt must be shorter than the context of {CONTEXT_TOKENS} tokens"
    machine = f"{cpu_name()}, {args.threads} threads for each engine, Python {platform.python_version()}"
    print(machine)
    figures = {}
    with tempfile.TemporaryDirectory() as directory:
        model = servable(args.shape, Path(directory) / "model")
        with (
            ours(Path(directory) / "holder", model, args.threads, "--kv-transfer") as holder,
            ours(Path(directory) / "loader", model, args.threads, "--kv-transfer-peers", "127.0.0.1") as loader,
        ):
            pair = Pair(holder, loader)
            pair.round(args.tokens[0])  # warm-up
            for tokens in args.tokens:
                rounds = [pair.round(tokens) for _ in range(args.rounds)]
                found = {name: statistics.median(each[name] for each in rounds) for name in rounds[0]}
                figures[str(tokens)] = {name: round(1000 * value, 2) for name, value in found.items()}
                print(
                    f"{tokens:6} tokens", *(f"{name}: {1000 * value:.1f} ms" for name, value in found.items()), sep="  "
                )
            rounds = [pair.gaps(max(args.tokens)) for _ in range(args.rounds)]
            gaps = {name: round(1000 * statistics.median(each[name] for each in rounds), 1) for name in rounds[0]}
            print("p99 gap of another stream", *(f"{name}: {value} ms" for name, value in gaps.items()), sep="  ")
    if args.result:
        date = datetime.now(UTC).date().isoformat()
        result = {"machine": machine, "date": date, "shape": args.shape, "rounds": args.rounds, "milliseconds": figures}
        result["p99_gap_milliseconds"] = gaps
        args.result.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


class Pair:
    """An engine that has blocks, and one that loads them."""

    def __init__(self, holder: str, loader: str) -> None:
        address = urlsplit(holder)
        self._source = {
            "do_remote_prefill": True, "remote_host": address.hostname, "remote_port": address.port
        }  # fmt: skip
        self._holder, self._loader = Load(holder), Load(loader)
        self._loader_url = loader

    def round(self, tokens: int) -> dict[str, float]:
        """Seconds to the first token, by the way in which the engine gets the blocks."""
        computed, loaded, from_busy = (self._loader.prompt(tokens) for _ in range(3))
        for prompt in (loaded, from_busy):
            self._holder.first(prompt)
        seconds = {COMPUTED: self._first(computed), LOADED: self._first_loaded(loaded)}
        with self._busy_holder():
            seconds[FROM_BUSY] = self._first_loaded(from_busy)
        return seconds | {CACHED: self._first(computed)}

    def gaps(self, tokens: int) -> dict[str, float]:
        """The 99th percentile of the gaps of a stream, in seconds, by what happens beside it."""

        def load(prompts: list[list[int]]) -> None:
            for prompt in prompts:
                self._first_loaded(prompt)

        def compute() -> None:
            for _ in range(PROMPTS_BESIDE):
                self._first(self._loader.prompt(tokens))

        def held() -> list[list[int]]:
            prompts = [self._loader.prompt(tokens) for _ in range(PROMPTS_BESIDE)]
            for prompt in prompts:
                self._holder.first(prompt)
            return prompts

        first, second = held(), held()
        return {
            "alone": _p99_gap(self._loader, lambda: time.sleep(ALONE_SECONDS)),
            "computing": _p99_gap(self._loader, compute),
            "loading": _p99_gap(self._loader, lambda: load(first)),
            "serving": _p99_gap(self._holder, lambda: load(second)),
        }

    def _first(self, prompt: list[int], **fields: Any) -> float:
        began = time.perf_counter()
        return self._loader.tokens(prompt, 1, **fields)[0] - began

    def _first_loaded(self, prompt: list[int]) -> float:
        before = self._num_loads()
        seconds = self._first(prompt, kv_transfer_params=self._source)
        assert self._num_loads() == before + 1, "the blocks were not loaded"
        return seconds

    def _num_loads(self) -> float:
        lines = httpx2.get(f"{self._loader_url}/metrics").text.splitlines()
        found = (line for line in lines if line.startswith("warmpath:kv_loads_total") and 'outcome="complete"' in line)
        return sum(float(line.rsplit(" ", 1)[1]) for line in found)

    @contextmanager
    def _busy_holder(self) -> Iterator[None]:
        """The holder computes prompts until the end of the block."""
        stop = threading.Event()
        started = threading.Event()

        def work() -> None:
            while not stop.is_set():
                started.set()
                self._holder.first(self._holder.prompt(BUSY_PROMPT))

        thread = threading.Thread(target=work)
        thread.start()
        started.wait()
        time.sleep(0.05)  # until the prompt is in the engine
        try:
            yield
        finally:
            stop.set()
            thread.join()


def _p99_gap(load: Load, beside: Callable[[], None]) -> float:
    """The 99th percentile of the time between two chunks of a stream while `beside` runs, in seconds."""
    stop, times = threading.Event(), list[float]()
    prompt = load.prompt(SHORT_PROMPT)
    stream = threading.Thread(target=lambda: times.extend(load.tokens(prompt, STREAM_TOKENS, stop)))
    stream.start()
    time.sleep(STREAM_START_SECONDS)
    began = time.perf_counter()
    beside()
    ended = time.perf_counter()
    stop.set()
    stream.join()
    gaps = sorted(after - before for before, after in pairwise(times) if began <= after and before <= ended)
    return gaps[int(0.99 * len(gaps))]


if __name__ == "__main__":
    main()
