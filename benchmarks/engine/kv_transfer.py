"""When it pays to load a prompt's blocks from another engine: `python -m benchmarks.engine.kv_transfer`.

Two engines on this machine serve one checkpoint of random weights, and exchange blocks over the loopback interface.
Each round measures the seconds to the first token of new prompts, over HTTP, in four ways:

    computed    the engine computes the prompt
    loaded      the other engine has the prompt's blocks, and is idle
    loaded from busy    the same while the other engine computes other prompts
    cached      the engine has the blocks itself

The figures are medians of the rounds. The last token of a prompt and its last, incomplete block are always computed.
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
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx2

from benchmarks.engine.cpu import cpu_name
from benchmarks.engine.peers import CONTEXT_TOKENS, Load, ours, servable
from benchmarks.engine.shapes import SHAPES

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
    if args.result:
        date = datetime.now(UTC).date().isoformat()
        result = {"machine": machine, "date": date, "shape": args.shape, "rounds": args.rounds, "milliseconds": figures}
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


if __name__ == "__main__":
    main()
