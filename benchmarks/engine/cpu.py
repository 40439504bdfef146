"""The engine's speed as a share of this CPU's limits: of memory bandwidth in decode, of matrix units in prefill.

    python -m benchmarks.engine.cpu [--shapes tiny small experts] [--threads N] [--clock wall] [--rounds 5]
        [--result FILE]

The checkpoints have random weights and three shapes: 100 and 387 million parameters, and 881 million in a mixture of
experts, of which 175 are active per token; all in bfloat16. Each round measures the machine's limits and the engine
alternately and compares them within the round, because a virtual machine's memory may be half as fast a minute later.
Each figure is that of the round with the median ratio to its limit. The engine runs in this process, without HTTP. If
other processes use all cores, `--threads 1 --clock cpu` still gives valid ratios: it compares the engine's CPU seconds
with those of the limits.

    read        the maximum bytes per second that all threads together read from memory, over as many bytes as the
                weights have, in huge pages as the weights are
    gemm        the maximum operations per second of torch's matrix product, sustained for a third of a second, over
                several shapes, in bfloat16 or, if the CPU has no bfloat16 products, in float32; sustained, because what
                is compared with it takes at least as long, and a CPU is fastest in its first moments
    one         tokens per second of one sequence; its limit: the bytes of weights and cache at read. With experts, the
                weights are those that as many tokens activate on average, if all experts are equally likely
    sixteen     tokens per second of 16 sequences, 256 tokens in and 64 out, including prefill; its limit: the prompts
                at gemm, then 64 steps, each the weights and cache at read, or the products of 16 rows at gemm,
                whichever takes longer
    ttft        seconds to the first token after a prompt of 1024; its limit: the prompt's operations at gemm
    warm        the same for a prompt that shares its first 1024 tokens with an earlier one
    int8, int4  tokens per second of one sequence, with quantised weights
    dispatch    seconds per step of one sequence with layers that compute almost nothing: the cost of Python, of torch
                and of waking the threads
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import platform
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from backend.engine.config import EngineConfig
from backend.engine.engine import Engine
from backend.engine.request import Request
from backend.engine.sampling_params import SamplingParams
from backend.huge_pages import HugePages
from backend.models.config import ModelConfig
from backend.native import library
from benchmarks.engine.shapes import SHAPES, make_checkpoint

PROMPT_TOKENS = 1024
BATCH, BATCH_PROMPT_TOKENS, BATCH_OUTPUT_TOKENS = 16, 256, 64
DECODE_PROMPT_TOKENS, DECODE_TOKENS = 128, 48
NUM_BLOCKS = 1024
# Layers that compute almost nothing. Their number stays that of the shape.
HOLLOW = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "moe_intermediate_size": 64,
}
GEMM_SECONDS = 0.33  # duration of the sustained products
READ_SOURCE = Path(__file__).with_name("read.c")

# Reference: vLLM 0.32 with 16 sequences, on a machine that read 55 GB/s and computed 406 GFLOP/s.
PEER_READ, PEER_GEMM = 55e9, 406e9
PEER_SIXTEEN = {"tiny": 290.0, "small": 73.0}


class Size:
    """Bytes to read and operations to compute, from a checkpoint's configuration."""

    def __init__(self, model: ModelConfig) -> None:
        attention = model.hidden_size * model.head_dim * 2 * (model.num_heads + model.num_kv_heads)
        experts = model.layers[0].experts  # the same in every layer
        inner = experts.intermediate_size if experts else model.intermediate_size
        self._num_experts, self._num_chosen = (experts.num_experts, experts.num_per_token) if experts else (1, 1)
        self._mlp_params = model.num_layers * 3 * model.hidden_size * inner  # of one expert per layer
        self._other_params = model.num_layers * (attention + (self._num_experts if experts else 0) * model.hidden_size)
        self.model = model
        self.layer_params = self._other_params + self._num_chosen * self._mlp_params  # active per token
        self.head_params = model.vocab_size * model.hidden_size
        self.weight_bytes = 2 * (self._other_params + self._num_experts * self._mlp_params + self.head_params)
        self.token_bytes = (
            2 * 2 * model.num_layers * model.num_kv_heads * model.head_dim
        )  # keys and values of one token

    def step_bytes(self, rows: int) -> float:
        """Bytes of the weights that a step with so many tokens reads."""
        active = self._num_experts * (1.0 - (1.0 - self._num_chosen / self._num_experts) ** rows)
        return 2.0 * (self._other_params + active * self._mlp_params + self.head_params)

    def prompt_operations(self, tokens: int) -> float:
        """Operations of all layers over a prompt, with causal attention, and of one row of logits."""
        attention = 2.0 * self.model.num_layers * tokens * tokens * self.model.num_heads * self.model.head_dim
        return 2.0 * tokens * self.layer_params + attention + 2.0 * self.head_params

    def one_seconds(self, read: float) -> float:
        context = DECODE_PROMPT_TOKENS + DECODE_TOKENS / 2
        return (self.step_bytes(1) + context * self.token_bytes) / read

    def sixteen_seconds(self, read: float, gemm: float) -> float:
        prompts = BATCH * self.prompt_operations(BATCH_PROMPT_TOKENS) / gemm
        context = BATCH_PROMPT_TOKENS + BATCH_OUTPUT_TOKENS / 2
        reading = (self.step_bytes(BATCH) + BATCH * context * self.token_bytes) / read
        computing = 2.0 * BATCH * (self.layer_params + self.head_params) / gemm
        return prompts + BATCH_OUTPUT_TOKENS * max(reading, computing)


Clock = Callable[[], float]
CLOCKS: dict[str, Clock] = {"wall": time.perf_counter, "cpu": time.process_time}


def seconds_of(run: Callable[[], object], clock: Clock) -> float:
    started = clock()
    run()
    return clock() - started


class MemoryRead:
    """Reads memory in huge pages, with all threads together."""

    def __init__(self, num_bytes: int, threads: int, directory: Path, clock: Clock) -> None:
        """directory: for the compiled read.c."""
        self._threads = threads
        self._clock = clock
        self._words = HugePages().zeros((num_bytes // 8,), torch.int64).fill_(1)
        shared_library = directory / "read.so"
        compiler = shutil.which("cc") or "gcc"
        flags = ("-O3", "-march=native", "-fopenmp", "-shared", "-fPIC")
        subprocess.run([compiler, *flags, str(READ_SOURCE), "-o", str(shared_library)], check=True)
        self._read = ctypes.CDLL(str(shared_library)).read_all
        self._read.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int]

    def bytes_per_second(self, tries: int = 4) -> float:
        """The highest speed of so many tries."""
        pointer, count = self._words.data_ptr(), len(self._words)
        read = partial(self._read, pointer, count, self._threads)
        return self._words.nbytes / min(seconds_of(read, self._clock) for _ in range(tries))


class Limits:
    """The limits of the machine, measured again in each round."""

    def __init__(self, size: Size, threads: int, directory: Path, clock: Clock) -> None:
        self._clock = clock
        self._memory = MemoryRead(size.weight_bytes, threads, directory, clock)
        hidden, inner = size.model.hidden_size, size.model.intermediate_size
        sizes = [(1024, 2048, 2048), (1024, hidden, 2 * inner), (512, inner, hidden)]
        self._products = [
            (2.0 * m * k * n, torch.randn(m, k, dtype=dtype), torch.randn(n, k, dtype=dtype))
            for m, k, n in sizes
            for dtype in (torch.bfloat16, torch.float32)
        ]

    def read(self, tries: int = 4) -> float:
        return self._memory.bytes_per_second(tries)

    def gemm(self) -> float:
        return max(self._kept_up(*product) for product in self._products)

    def _kept_up(self, operations: float, x: Tensor, w: Tensor) -> float:
        began, count = self._clock(), 0
        while (seconds := self._clock() - began) < GEMM_SECONDS:
            torch.nn.functional.linear(x, w)
            count += 1
        return count * operations / seconds


def load(model_dir: Path, threads: int, quantization: str = "none") -> Engine:
    return Engine.load(
        EngineConfig(
            model_dir=model_dir, device="cpu", num_threads=threads, num_blocks=NUM_BLOCKS, quantization=quantization
        )
    )


class Load:
    """Runs requests on one engine. Every prompt is new, so that none is in the prefix cache."""

    def __init__(self, engine: Engine, clock: Clock) -> None:
        self.engine = engine
        self._clock = clock
        self._vocab_size = engine.config.model.vocab_size
        self._count = 0

    def prompt(self, length: int) -> list[int]:
        self._count += 1
        generator = torch.Generator().manual_seed(self._count)
        return [int(token) for token in torch.randint(self._vocab_size, (length,), generator=generator)]

    def add(self, prompt: list[int], max_tokens: int) -> None:
        self._count += 1
        self.engine.add(Request(f"r{self._count}", prompt, SamplingParams(max_tokens=max_tokens, temperature=0.0)))

    def finish(self) -> None:
        while self.engine.has_unfinished:
            self.engine.step()

    def one(self) -> float:
        """The median step of one sequence, in seconds."""
        self.add(self.prompt(DECODE_PROMPT_TOKENS), DECODE_TOKENS + 1)
        self.engine.step()
        steps = sorted(seconds_of(self.engine.step, self._clock) for _ in range(DECODE_TOKENS))
        assert not self.engine.has_unfinished
        return steps[len(steps) // 2]

    def sixteen(self) -> float:
        for _ in range(BATCH):
            self.add(self.prompt(BATCH_PROMPT_TOKENS), BATCH_OUTPUT_TOKENS)
        return seconds_of(self.finish, self._clock)

    def cold_and_warm(self) -> tuple[float, float]:
        shared = self.prompt(PROMPT_TOKENS)
        self.add(shared, 1)
        cold = seconds_of(self.finish, self._clock)
        self.add([*shared, 1, 2, 3, 4], 1)
        return cold, seconds_of(self.finish, self._clock)


def measure(name: str, threads: int, clock: Clock, rounds: int, directory: Path) -> tuple[Size, list[dict[str, float]]]:
    """Measure one shape. Returns rates per second and seconds by round, the best if measured repeatedly."""
    model_dir = make_checkpoint(name, directory / name)
    hollow_dir = make_checkpoint(name, directory / "hollow", **HOLLOW)
    loads = {kind: Load(load(model_dir, threads, kind), clock) for kind in ("none", "int8", "int4")}
    hollow = Load(load(hollow_dir, threads), clock)
    size = Size(loads["none"].engine.config.model)
    limits = Limits(size, threads, directory, clock)

    def measured() -> dict[str, float]:
        reads, gemms, found = [limits.read()], [], {}
        for key, kind in (("one", "none"), ("int8", "int8"), ("int4", "int4")):
            found[key] = 1 / loads[kind].one()
            reads.append(limits.read())
        found["dispatch"] = hollow.one()
        gemms.append(limits.gemm())
        found["ttft"], found["warm"] = loads["none"].cold_and_warm()
        gemms.append(limits.gemm())
        found["sixteen"] = BATCH * BATCH_OUTPUT_TOKENS / loads["none"].sixteen()
        gemms.append(limits.gemm())
        return found | {"read": max(reads), "gemm": max(gemms)}

    measured()  # warm-up
    return size, [measured() for _ in range(rounds)]


@dataclass(frozen=True, slots=True)
class Row:
    what: str
    figure: str
    ratio: float
    of: str
    goal: str


def median_rows(name: str, size: Size, rounds: list[dict[str, float]]) -> list[Row]:
    """For each figure, the round with the median ratio; with an even number of rounds, the lower of the middle two."""
    rows = [rows_of_round(name, size, found) for found in rounds]
    return [sorted(same, key=lambda row: row.ratio)[(len(same) - 1) // 2] for same in zip(*rows, strict=True)]


def rows_of_round(name: str, size: Size, found: dict[str, float]) -> list[Row]:
    """The figures of one round, as ratios to their limits, with their goals."""
    tokens = BATCH * BATCH_OUTPUT_TOKENS
    one = 1 / size.one_seconds(found["read"])
    sixteen = tokens / size.sixteen_seconds(found["read"], found["gemm"])
    peer = PEER_SIXTEEN.get(name, 0.0) / (tokens / size.sixteen_seconds(PEER_READ, PEER_GEMM))
    goal = f">= {1.5 * peer:.2f}" if peer else ""
    ttft = size.prompt_operations(PROMPT_TOKENS) / found["gemm"]
    faster = {kind: found[kind] / found["one"] for kind in ("int8", "int4")}

    def speed(key: str) -> str:
        return f"{found[key]:.1f} tok/s"

    def milliseconds(key: str) -> str:
        return f"{found[key] * 1e3:.1f} ms"

    return [
        Row("one sequence", speed("one"), found["one"] / one, f"limit {one:.1f}", ">= 0.60"),
        Row("16 concurrent", speed("sixteen"), found["sixteen"] / sixteen, f"limit {sixteen:.0f}", goal),
        Row("TTFT, 1024 tokens", milliseconds("ttft"), ttft / found["ttft"], f"limit {ttft * 1e3:.0f}", ">= 0.80"),
        Row("TTFT, warm", milliseconds("warm"), found["warm"] / found["ttft"], "cold", "< 0.10"),
        Row("int8, one sequence", speed("int8"), faster["int8"], "bfloat16", ">= 1.60"),
        Row("int4, one sequence", speed("int4"), faster["int4"], "bfloat16", ""),
        Row("dispatch of a step", milliseconds("dispatch"), found["dispatch"] * found["one"], "a step", ""),
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description="The engine on this CPU, beside the CPU's own limits.")
    parser.add_argument("--shapes", nargs="+", choices=[*SHAPES], default=[*SHAPES])
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="threads of the engine (default: all)")
    parser.add_argument("--clock", choices=[*CLOCKS], default="wall", help="cpu: valid for one thread only")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--result", type=Path, help="a file for the figures")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    native = library.load()
    level = native.level_names[-1] if native else "none"
    machine = f"{cpu_name()}, {args.threads} threads, {args.clock} time, kernels {level}, torch {torch.__version__}"
    print(machine)
    figures = {}
    for name in args.shapes:
        with tempfile.TemporaryDirectory() as directory:
            size, rounds = measure(name, args.threads, CLOCKS[args.clock], args.rounds, Path(directory))
        read, gemm = ([f"{found[key] / 1e9:.0f}" for found in rounds] for key in ("read", "gemm"))
        print(f"\n{name}: read {', '.join(read)} GB/s, gemm {', '.join(gemm)} GFLOP/s")
        rows = median_rows(name, size, rounds)
        for row in rows:
            print(f"  {row.what:20}{row.figure:>14}{row.ratio:8.2f} of {row.of:12}{row.goal:>10}")
        figures[name] = {"rounds": rounds, "judged": [asdict(row) for row in rows]}
    if args.result:
        load_average = f"load average {os.getloadavg()[0]:.0f} at the end"
        date = datetime.now(UTC).date().isoformat()
        result = {"machine": f"{machine}, {load_average}", "date": date, "rounds": args.rounds, "figures": figures}
        args.result.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def cpu_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.machine()}, {os.cpu_count()} CPUs"


if __name__ == "__main__":
    main()
