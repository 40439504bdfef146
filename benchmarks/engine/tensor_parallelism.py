"""Memory and time of one model, computed by one process and divided among several (--tensor-parallel-size).

    python -m benchmarks.engine.tensor_parallelism [--shape small] [--sizes 1 2] [--device auto] [--rounds 3]

Each size is measured in processes of its own, in turns, with the same checkpoint of random weights in bfloat16, the
same number of KV blocks and one thread per process on a CPU. A line has

    memory   MiB of each rank: on a CPU its private memory (RssAnon), on a GPU what is in use of the device
    one      milliseconds of a decode step of one sequence: the median of a round, and the best round
    many     the same of 16 sequences
    prompt   milliseconds until the first token after 1,024 tokens, best round

On a CPU, all ranks share the memory's bandwidth and exchange results over sockets, so several are not faster than one
process with as many threads. The figures that matter are those of GPUs; there is no such machine in the tests.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from backend.engine.config import EngineConfig
from backend.engine.engine import Engine
from backend.engine.request import Request
from backend.engine.sampling_params import SamplingParams
from benchmarks.engine.shapes import SHAPES, VOCAB_SIZE, make_checkpoint

STEPS, PROMPT, MANY = 32, 1024, 16
NUM_BLOCKS = 512


def measure(directory: Path, size: int, device: str) -> dict[str, Any]:
    """One round of one size, in this process and its followers."""
    config = EngineConfig(
        model_dir=directory, device=device, tensor_parallel_size=size, num_blocks=NUM_BLOCKS, max_model_len=2048,
        num_threads=1, enable_prefix_caching=False, max_num_batched_tokens=PROMPT,
    )  # fmt: skip
    engine = Engine.load(config)
    try:
        step_ms(engine, 1, 8)  # compiles and records
        return {
            "prompt": first_token_ms(engine),
            "one": step_ms(engine, 1, STEPS),
            "many": step_ms(engine, MANY, STEPS),
            "memory": memory_mib(engine, size),
        }
    finally:
        engine.runner.model.close()


def first_token_ms(engine: Engine) -> float:
    prompt = [(7 * i * i + i) % VOCAB_SIZE for i in range(PROMPT)]
    engine.add(Request("prompt", prompt, SamplingParams(max_tokens=1, temperature=0.0)))
    began = time.perf_counter()
    while engine.has_unfinished:
        engine.step()
    return 1e3 * (time.perf_counter() - began)


def step_ms(engine: Engine, count: int, steps: int) -> float:
    """The median time of a decode step of `count` sequences."""
    for i in range(count):
        engine.add(Request(f"r{i}", [i + 1] * 64, SamplingParams(max_tokens=steps, temperature=0.0)))
    times = []
    while engine.has_unfinished:
        began = time.perf_counter()
        engine.step()
        times.append(1e3 * (time.perf_counter() - began))
    return statistics.median(times[2:])


def memory_mib(engine: Engine, size: int) -> list[int]:
    device = engine.config.device
    if device.type == "cuda":
        free = [torch.cuda.mem_get_info(device.index + rank) for rank in range(size)]
        return [(total - unused) >> 20 for unused, total in free]
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    return [private_mib("self"), *map(private_mib, children)]


def private_mib(pid: str) -> int:
    (kib,) = re.findall(r"^RssAnon:\s+(\d+) kB$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    return int(kib) >> 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=tuple(SHAPES), default="small")
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--device", default="auto")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--of", type=Path, help=argparse.SUPPRESS)  # measure one size here, with this checkpoint
    args = parser.parse_args()
    if args.of:
        print(json.dumps(measure(args.of, args.sizes[0], args.device)))
        return
    with tempfile.TemporaryDirectory() as folder:
        directory = make_checkpoint(args.shape, Path(folder))
        rounds: dict[int, list[dict[str, Any]]] = {size: [] for size in args.sizes}
        for _ in range(args.rounds):
            for size, found in rounds.items():
                command = [sys.executable, "-m", "benchmarks.engine.tensor_parallelism", "--of", str(directory)]
                command += ["--sizes", str(size), "--device", args.device]
                found.append(json.loads(subprocess.run(command, check=True, capture_output=True).stdout))
    for size, found in rounds.items():
        best = {name: round(min(each[name] for each in found), 1) for name in ("one", "many", "prompt")}
        print(f"{args.shape} size {size}: memory {found[-1]['memory']} MiB, ms {best}")


if __name__ == "__main__":
    main()
