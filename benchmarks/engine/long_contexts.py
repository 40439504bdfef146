"""Long prompts and long contexts beside the CPU's limits: `python -m benchmarks.engine.long_contexts`.

The figures are fractions of the limits of `cpu.py`, as the median of the rounds. `prompt` and `decode` must be at least
`MUST`.

    prompt    seconds to the first token after a prompt of so many tokens; its limit: the operations of all layers,
              causal attention included, at the speed of torch's matrix products, the higher one of before and after
    decode    the time of a step of one sequence after such a prompt; its limit: the bytes of the weights and of the
              sequence's keys and values at the memory's speed. Steps and reads take turns, because the memory of a
              virtual machine may be twice as fast a second later. The figure is the median of the pairs
    fastest   the same from the fastest step and the fastest read of a round, which may be seconds apart
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
from backend.native import library
from benchmarks.engine.cpu import Limits, Load, Size, cpu_name, seconds_of
from benchmarks.engine.shapes import SHAPES, make_checkpoint

MUST = 0.8
PAIRS = 24  # of a read and a step, in a round
DECODE_TOKENS = 2 * PAIRS + 1
BLOCK_TOKENS = 16


def main() -> None:
    parser = argparse.ArgumentParser(description="Long prompts and long contexts beside the CPU's limits.")
    parser.add_argument("--shape", choices=[*SHAPES], default="tiny")
    parser.add_argument("--contexts", type=int, nargs="+", default=[1024, 8192, 16_384])
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="threads of the engine (default: all)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--result", type=Path, help="a file for the figures")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    native = library.load()
    level = native.level_names[-1] if native else "none"
    print(machine := f"{cpu_name()}, {args.threads} threads, kernels {level}, torch {torch.__version__}")
    longest = max(args.contexts) + DECODE_TOKENS + BLOCK_TOKENS
    figures: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as directory:
        model_dir = make_checkpoint(args.shape, Path(directory) / "model", max_position_embeddings=longest)
        blocks = 2 * longest // BLOCK_TOKENS
        config = EngineConfig(model_dir=model_dir, device="cpu", num_threads=args.threads, num_blocks=blocks)
        load = Load(Engine.load(config), time.perf_counter)
        size = Size(load.engine.config.model)
        limits = Limits(size, args.threads, Path(directory), time.perf_counter)
        measure(load, size, limits, 256)  # warm-up
        for context in args.contexts:
            rounds = [measure(load, size, limits, context) for _ in range(args.rounds)]
            found = figures[str(context)] = {k: statistics.median(r[k] for r in rounds) for k in rounds[0]}
            print(
                f"{context:6} tokens: prompt {found['prompt_s']:.2f} s, {found['prompt']:.2f} of the limit; decode "
                f"{found['decode_ms']:.1f} ms a token, {found['decode']:.2f} of the limit "
                f"({found['read_gb']:.0f} GB/s), fastest {found['fastest']:.2f}"
            )
    holds = all(min(found["prompt"], found["decode"]) >= MUST for found in figures.values())
    print(f"at least {MUST} of the limits: {'holds' if holds else 'FAILS'}")
    if args.result:
        date = datetime.now(UTC).date().isoformat()
        load_average = f"load average {os.getloadavg()[0]:.0f} at the end"
        result = {"machine": f"{machine}, {load_average}", "date": date, "rounds": args.rounds, "shape": args.shape}
        result["figures"] = figures
        args.result.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def measure(load: Load, size: Size, limits: Limits, context: int) -> dict[str, float]:
    """One round. `prompt`, `decode` and `fastest` are fractions of the limits."""
    engine = load.engine
    gemms = [limits.gemm()]
    load.add(load.prompt(context), DECODE_TOKENS)

    def first_token() -> None:
        while not any(request.num_output_tokens for request in engine.scheduler.running):
            engine.step()

    prompt = seconds_of(first_token, time.perf_counter)
    gemms.append(limits.gemm())
    reads, steps = [], []
    for _ in range(PAIRS):
        limits.read(tries=1)  # not measured: wakes the threads of the read
        reads.append(limits.read(tries=1))
        engine.step()  # not measured: the threads of the read spin for a while after it
        steps.append(seconds_of(engine.step, time.perf_counter))
    num_bytes = size.step_bytes(1) + (context + DECODE_TOKENS / 2) * size.token_bytes
    return {
        "prompt_s": prompt,
        "prompt": size.prompt_operations(context) / max(gemms) / prompt,
        "decode_ms": statistics.median(steps) * 1e3,
        "read_gb": statistics.median(reads) / 1e9,
        "decode": statistics.median(num_bytes / read / step for read, step in zip(reads, steps, strict=True)),
        "fastest": num_bytes / max(reads) / min(steps),
    }


if __name__ == "__main__":
    main()
