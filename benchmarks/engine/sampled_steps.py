"""What sampling costs a decode step at a vocabulary of 152k: `python -m benchmarks.engine.sampled_steps`.

One engine with the shape and the vocabulary of Qwen2.5-0.5B, the smallest common model with so many tokens, and random
weights. In each round, the kinds take turns with the same prompts. The figure is the time of a decode step of `--rows`
sequences over that of a greedy step, as the median of the rounds. It must be at most `MUST` for each kind.
`sampler.py` measures the sampler alone.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from backend.engine.config import EngineConfig
from backend.engine.engine import Engine
from backend.engine.request import Request
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
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="threads of the engine (default: all)")
    parser.add_argument("--result", type=Path, help="a file for the figures")
    args = parser.parse_args()
    print(machine := f"{cpu_name()}, {args.threads} threads, Python {platform.python_version()}")
    figures: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as directory:
        model_dir = make_checkpoint(args.shape, Path(directory) / "model", vocab_size=VOCAB_SIZE)
        engine = Engine.load(EngineConfig(model_dir=model_dir, device="cpu", num_threads=args.threads, num_blocks=512))
        for rows in args.rows:
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


def step_seconds(engine: Engine, kind: str, rows: int) -> float:
    """The median time of a decode step."""
    for row in range(rows):
        prompt = [(row * 7919 + i * 104_729) % VOCAB_SIZE for i in range(PROMPT_TOKENS)]
        sampling = SamplingParams(max_tokens=STEPS + 1, seed=row, **KINDS[kind])
        engine.add(Request(f"{kind}{row}", prompt, sampling))
    times = []
    while engine.has_unfinished:
        is_decode = all(not request.num_uncomputed_tokens > 1 for request in engine.scheduler.running)
        began = time.perf_counter()
        engine.step()
        if is_decode and len(engine.scheduler.running) == rows:
            times.append(time.perf_counter() - began)
    return statistics.median(times)


if __name__ == "__main__":
    main()
