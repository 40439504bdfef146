"""Cost of background streams for an interactive request on the engine, and its cost for them.

    python -m benchmarks.engine.background [--shapes tiny small] [--rounds 5] [--calls 20] [--result FILE]

Each round measures three loads on one engine: interactive requests alone, background streams alone, and both.
Interactive requests come one after another, each with its own prompt, after a pause of about three times the duration
of one alone. Their figure is the time to first token. There are always eight background streams: when one ends, another
starts with a new prompt. Their figure is the tokens per second that they receive. Percentiles are over the times of all
rounds. The ratios are comparable across machines: TTFT p99 beside the streams over p99 and p50 alone, and the streams'
rate beside the requests over their rate alone.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import random
import statistics
import tempfile
import time
from contextlib import aclosing
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from backend.engine.async_engine import AsyncEngine
from backend.engine.config import EngineConfig
from backend.engine.engine import Engine
from backend.engine.request import Request
from backend.engine.sampling_params import SamplingParams
from benchmarks.engine.shapes import SHAPES, VOCAB_SIZE, make_checkpoint

STREAMS = 8
BACKGROUND_PROMPT, BACKGROUND_OUTPUT, BACKGROUND_PRIORITY = 256, 64, 10
INTERACTIVE_PROMPT, INTERACTIVE_OUTPUT = 128, 8
PAUSE = 3.0  # as a multiple of the duration of an interactive request alone


@dataclass
class Load:
    """The requests to one engine, and their measurements."""

    engine: AsyncEngine
    ttft_alone: list[float] = field(default_factory=list)  # in seconds
    ttft_beside: list[float] = field(default_factory=list)
    rate_alone: list[float] = field(default_factory=list)  # in tokens per second, one per round
    rate_beside: list[float] = field(default_factory=list)
    num_background_tokens: int = 0
    ids: itertools.count[int] = field(default_factory=itertools.count)
    random: random.Random = field(default_factory=lambda: random.Random(0))

    def request(self, prompt: int, output: int, priority: int) -> Request:
        token_ids = [self.random.randrange(VOCAB_SIZE) for _ in range(prompt)]
        sampling = SamplingParams(max_tokens=output, temperature=0.0)
        return Request(f"r{next(self.ids)}", token_ids, sampling, priority=priority)

    async def interactive(self, calls: int, pause_seconds: float) -> list[float]:
        times = []
        for _ in range(calls):
            await asyncio.sleep(self.random.uniform(0.5, 1.5) * pause_seconds)
            started = time.perf_counter()
            async with aclosing(self.engine.submit(self.request(INTERACTIVE_PROMPT, INTERACTIVE_OUTPUT, 0))) as stream:
                await anext(stream)
                times.append(time.perf_counter() - started)
                async for _ in stream:
                    pass
        return times

    async def background(self) -> None:
        while True:
            request = self.request(BACKGROUND_PROMPT, BACKGROUND_OUTPUT, BACKGROUND_PRIORITY)
            async with aclosing(self.engine.submit(request)) as stream:
                async for output in stream:
                    self.num_background_tokens += len(output.new_token_ids)

    async def round(self, calls: int, pause_seconds: float) -> None:
        self.ttft_alone += await self.interactive(calls, pause_seconds)
        streams = [asyncio.create_task(self.background()) for _ in range(STREAMS)]
        await asyncio.sleep(pause_seconds)  # until all of them are running
        for kind in random.Random(calls).sample(("alone", "beside"), 2):
            before, started = self.num_background_tokens, time.perf_counter()
            if kind == "beside":
                self.ttft_beside += await self.interactive(calls, pause_seconds)
            else:
                await asyncio.sleep(calls * pause_seconds)
            rate = (self.num_background_tokens - before) / (time.perf_counter() - started)
            (self.rate_beside if kind == "beside" else self.rate_alone).append(rate)
        for stream in streams:
            stream.cancel()
        await asyncio.gather(*streams, return_exceptions=True)
        await self.engine.wait_idle()


async def measure(model_dir: Path, rounds: int, calls: int, options: dict[str, Any]) -> dict[str, float]:
    engine = AsyncEngine(Engine.load(EngineConfig(model_dir=model_dir, **options)))
    await engine.start()
    try:
        load = Load(engine)
        await load.interactive(3, 0.0)  # to warm up
        started = time.perf_counter()
        await load.interactive(3, 0.0)
        pause_seconds = PAUSE * (time.perf_counter() - started) / 3
        for _ in range(rounds):
            await load.round(calls, pause_seconds)
    finally:
        await engine.stop()
    alone, beside = percentiles(load.ttft_alone), percentiles(load.ttft_beside)
    rate_alone, rate_beside = statistics.mean(load.rate_alone), statistics.mean(load.rate_beside)
    figures = {
        "calls": rounds * calls,
        **{f"TTFT alone {name}, ms": 1e3 * value for name, value in alone.items()},
        **{f"TTFT beside streams {name}, ms": 1e3 * value for name, value in beside.items()},
        "TTFT p99 beside / p99 alone": beside["p99"] / alone["p99"],
        "TTFT p99 beside / p50 alone": beside["p99"] / alone["p50"],
        "streams alone, tok/s": rate_alone,
        "streams beside requests, tok/s": rate_beside,
        "streams beside / alone": rate_beside / rate_alone,
    }
    return {name: round(value, 2) for name, value in figures.items()}


def percentiles(seconds: list[float]) -> dict[str, float]:
    ordered = sorted(seconds)
    return {f"p{p}": ordered[min(len(ordered) - 1, len(ordered) * p // 100)] for p in (50, 90, 99)}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--calls", type=int, default=20, help="interactive requests per round and kind")
    parser.add_argument("--num-threads", type=int, help="threads per step (default: the engine's choice)")
    parser.add_argument("--result", type=Path, help="a file for the figures")
    args = parser.parse_args()
    machine = f"{os.cpu_count()} CPUs, torch {torch.__version__}, load average {os.getloadavg()[0]:.1f}"
    print(machine)
    figures: dict[str, dict[str, float]] = {}
    for shape in args.shapes:
        with tempfile.TemporaryDirectory() as directory:
            model_dir = make_checkpoint(shape, Path(directory))
            figures[shape] = asyncio.run(measure(model_dir, args.rounds, args.calls, {"num_threads": args.num_threads}))
        print(f"\n{shape}")
        for name, value in figures[shape].items():
            print(f"  {name:36}{value:10.2f}")
    if args.result:
        result = {"machine": machine, "date": datetime.now(UTC).date().isoformat(), "shapes": figures}
        args.result.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
