"""What sampling costs a decode step at a vocabulary of 152k: `python -m benchmarks.engine.sampled_steps`.

One engine with the shape and the vocabulary of Qwen2.5-0.5B, the smallest common model with so many tokens, and random
weights. In each round, the kinds take turns with the same prompts. The figure is the time of a decode step of `--rows`
sequences over that of a greedy step, as the median of the rounds. It must be at most `MUST` for each kind.
`sampler.py` measures the sampler alone.

With `--cpu`, the figure is the CPU time of the sampler over that of a greedy step, with one thread and the least times.
It is measured for the logits of random weights (flat), and for logits with most of the mass on a few tokens (peaked),
in the model's dtype. The greedy step's argmax is part of both, so the sampler adds a little less than that.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from backend.engine.config import EngineConfig
from backend.engine.engine import Engine
from backend.engine.request import Request
from backend.engine.sampler import sample
from backend.engine.sampling_batch import NextToken, make_sampling_batch
from backend.engine.sampling_params import SamplingParams
from benchmarks.engine.cpu import cpu_name
from benchmarks.engine.shapes import SHAPES, make_checkpoint

MUST = 1.05
VOCAB_SIZE = 151_936
PROMPT_TOKENS, STEPS = 64, 24
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 0.8},
    "top_p": {"top_p": 0.9},
    "top_k": {"top_k": 40},
    "min_p": {"min_p": 0.05},
    "penalties": {"repetition_penalty": 1.1, "presence_penalty": 0.1, "frequency_penalty": 0.1},
    "all": {"top_p": 0.9, "top_k": 40, "min_p": 0.01, "repetition_penalty": 1.1},
}


def main() -> None:
    parser = argparse.ArgumentParser(description="What sampling costs a decode step at a vocabulary of 152k.")
    parser.add_argument("--shape", choices=[*SHAPES], default="small")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="threads of the engine (default: all)")
    parser.add_argument("--cpu", action="store_true", help="compare CPU times, for a busy machine")
    parser.add_argument("--result", type=Path, help="a file for the figures")
    args = parser.parse_args()
    threads = 1 if args.cpu else args.threads
    print(machine := f"{cpu_name()}, {threads} threads, Python {platform.python_version()}")
    figures: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as directory:
        model_dir = make_checkpoint(args.shape, Path(directory) / "model", vocab_size=VOCAB_SIZE)
        engine = Engine.load(EngineConfig(model_dir=model_dir, device="cpu", num_threads=threads, num_blocks=512))
        for rows in args.rows:
            if args.cpu:
                figures[str(rows)] = cpu_shares(engine, rows, args.rounds)
                continue
            rounds = [{kind: step_seconds(engine, kind, rows) for kind in KINDS} for _ in range(args.rounds + 1)][1:]
            greedy = statistics.median(found["greedy"] for found in rounds)
            ratios = {k: statistics.median(found[k] / found["greedy"] for found in rounds) for k in KINDS}
            figures[str(rows)] = {"greedy_ms": greedy * 1e3, **ratios}
            print(f"{rows} rows, greedy {greedy * 1e3:.1f} ms a step; times greedy:")
            for kind in [*KINDS][1:]:
                print(f"  {kind:12}{ratios[kind]:7.3f}  {'holds' if ratios[kind] <= MUST else 'FAILS'}")
    if args.result:
        date = datetime.now(UTC).date().isoformat()
        result = {"machine": machine, "date": date, "rounds": args.rounds, "must": MUST, "figures": figures}
        args.result.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def cpu_shares(engine: Engine, rows: int, rounds: int) -> dict[str, float]:
    """The CPU time of sampling over that of a greedy step, by distribution and kind."""
    greedy = min(min(step_times(engine, "greedy", rows, time.thread_time)) for _ in range(rounds))
    peaked = torch.randn(rows, VOCAB_SIZE) * 2
    peaked[:, :40] += torch.linspace(22, 8, 40)
    hidden = torch.randn(rows, engine.config.model.hidden_size).to(engine.config.dtype)
    with torch.inference_mode():
        given = {"flat": engine.runner.model.scores(hidden), "peaked": peaked.to(engine.config.dtype)}
        shares = {
            f"{kind}, {name}": min(sampling_times(engine, kind, logits, 5 * rounds)) / greedy
            for name, logits in given.items()
            for kind in [*KINDS][1:]
        }
    print(f"{rows} rows, greedy {greedy * 1e3:.1f} ms of CPU time a step; part of it that sampling takes:")
    for name, share in shares.items():
        print(f"  {name:20}{share:7.3f}  {'holds' if share <= MUST - 1 else 'FAILS'}")
    return {"greedy_ms": greedy * 1e3, **shares}


def sampling_times(engine: Engine, kind: str, logits: Tensor, count: int) -> list[float]:
    """The CPU times of sampling from these logits, including the making of its batch."""
    requests = []
    for row in range(len(logits)):
        request = Request(str(row), prompt_of(row), SamplingParams(max_tokens=STEPS, seed=row, **KINDS[kind]))
        for token_id in range(STEPS // 2):
            request.append(token_id)
        requests.append(NextToken(request))
    times = []
    for _ in range(count):
        began = time.thread_time()
        sample(logits, make_sampling_batch(requests, VOCAB_SIZE, logits.device), None, engine.runner.model.ops)
        times.append(time.thread_time() - began)
    return times


def prompt_of(row: int) -> list[int]:
    return [(row * 7919 + i * 104_729) % VOCAB_SIZE for i in range(PROMPT_TOKENS)]


def step_seconds(engine: Engine, kind: str, rows: int) -> float:
    """The median time of a decode step."""
    return statistics.median(step_times(engine, kind, rows, time.perf_counter))


def step_times(engine: Engine, kind: str, rows: int, clock: Callable[[], float]) -> list[float]:
    """The times of decode steps."""
    for row in range(rows):
        sampling = SamplingParams(max_tokens=STEPS + 1, seed=row, **KINDS[kind])
        engine.add(Request(f"{kind}{row}", prompt_of(row), sampling))
    times = []
    while engine.has_unfinished:
        is_decode = all(not request.num_uncomputed_tokens > 1 for request in engine.scheduler.running)
        began = clock()
        engine.step()
        if is_decode and len(engine.scheduler.running) == rows:
            times.append(clock() - began)
    return times


if __name__ == "__main__":
    main()
