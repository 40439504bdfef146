"""Time of a decode step on a CPU with each format of the KV cache: `python -m benchmarks.engine.kv_forms`.

    python -m benchmarks.engine.kv_forms [--shape tiny] [--threads N] [--rounds 5] [--result FILE]

The workloads are one sequence far into its context and sixteen shorter ones, on a checkpoint of random weights in
bfloat16. Each round measures all formats alternately, and their medians over all rounds are compared. A scaled format
halves the bytes to read, but each number must be converted.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path

import torch

from backend.engine.config import EngineConfig
from backend.engine.engine import Engine
from backend.kv_cache import KV_FORMATS
from benchmarks.engine.cpu import Load, cpu_name, seconds_of
from benchmarks.engine.shapes import SHAPES, make_checkpoint

WORKLOADS = {"one, 4000 tokens in": (1, 4000), "sixteen, 256 tokens in": (16, 256)}
NUM_STEPS = 24
NUM_BLOCKS = 1024


def step_seconds(load: Load, rows: int, length: int) -> float:
    """The median duration of the steps in which all sequences decode."""
    for _ in range(rows):
        load.add(load.prompt(length), NUM_STEPS + 1)
    seconds = []
    while load.engine.has_unfinished:
        seconds.append(seconds_of(load.engine.step, time.perf_counter))
    return statistics.median(seconds[-NUM_STEPS:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=[*SHAPES], default="tiny")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="threads of the engine (default: all)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--result", type=Path, help="a file for the figures")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory() as directory:
        model_dir = make_checkpoint(args.shape, Path(directory) / args.shape)
        loads = {
            form: Load(
                Engine.load(
                    EngineConfig(
                        model_dir=model_dir,
                        device="cpu",
                        num_threads=args.threads,
                        num_blocks=NUM_BLOCKS,
                        kv_cache_dtype=form,
                    )
                ),
                time.perf_counter,
            )
            for form in KV_FORMATS
        }
    seconds: dict[str, dict[str, list[float]]] = {what: {form: [] for form in KV_FORMATS} for what in WORKLOADS}
    for number in range(args.rounds + 1):
        for what, (rows, length) in WORKLOADS.items():
            for form, load in loads.items():
                spent = step_seconds(load, rows, length)
                if number:  # the first round is a warm-up
                    seconds[what][form].append(spent)
    medians = {
        what: {form: statistics.median(of_form) for form, of_form in forms.items()} for what, forms in seconds.items()
    }
    machine = f"{cpu_name()}, {args.threads} threads"
    print(f"{machine}, {args.shape}")
    for what, forms in medians.items():
        for form, median in forms.items():
            print(f"  {what:24}{form:10}{median * 1e3:8.2f} ms a step{median / forms['auto']:8.2f} of auto")
    if args.result:
        date = datetime.now(UTC).date().isoformat()
        steps = {what: {form: round(s * 1e3, 3) for form, s in forms.items()} for what, forms in medians.items()}
        result = {"machine": machine, "date": date, "shape": args.shape, "rounds": args.rounds, "step_ms": steps}
        args.result.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
