"""The engine's speed on one GPU, as a share of the GPU's limits and as a multiple of transformers' speed.

    python -m benchmarks.engine.gpu [--shapes qwen3-0.6b llama-3-8b] [--rounds 3] [--without-peer] [--result FILE]
    python -m benchmarks.engine.gpu --rehearse        runs the script with tiny shapes on a CPU, for no valid figures

The checkpoints have random weights in bfloat16. The GPU's limits are measured between the engine's rounds, and each
figure is the best of all rounds, limits included. The engine runs in this process, without HTTP, with the defaults that
users get.

    read    the maximum bytes per second that a sum over a large tensor reads
    gemm    the maximum bfloat16 operations per second of a square matrix product
    one     tokens per second of one sequence after 128 tokens; its limit: the bytes of weights and cache at read
    many    output tokens per second of 256 requests with 100 to 1024 tokens in and out, the same requests as for
            transformers' continuous batching
    top-p   output tokens per second of 64 requests with top-p 0.95 and top-k 20, as a share of the same 64 without
    ttft    seconds to the first token after a prompt of 8192; its limit: the prompt's operations at gemm
    warm    the same for a prompt that shares its first 8176 tokens with an earlier one
    start   seconds until the engine was ready, with whatever kernels it had to compile
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

from backend.engine.config import EngineConfig
from backend.engine.engine import Engine
from backend.engine.grammar import TokenSet
from backend.engine.request import Request
from backend.engine.sampling_params import SamplingParams
from backend.triton_runtime import HAS_TRITON
from benchmarks.engine.cpu import Row, Size

SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": {
        "model_type": "qwen3", "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
        "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151_936,
        "tie_word_embeddings": True, "max_position_embeddings": 40_960,
    },
    "llama-3-8b": {
        "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128_256,
        "tie_word_embeddings": False, "max_position_embeddings": 16_384,
    },
}  # fmt: skip
TINY = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 256,
}  # fmt: skip
ONE_GOALS = {"llama-3-8b": ">= 0.80"}
PEER_GOAL = ">= 5.00"
FILTER_GOAL = ">= 0.95"
SAMPLINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "filtered": {"top_p": 0.95, "top_k": 20},
    "penalised": {"top_p": 0.95, "top_k": 20, "presence_penalty": 0.5, "repetition_penalty": 1.1},
    "scored": {"logprobs": 5},
}
# The rows of 64 sequences, each compared with "plain".
SAMPLED = (
    ("filtered", "top-p", FILTER_GOAL),
    ("penalised", "top-p and penalties", FILTER_GOAL),
    ("scored", "log-probabilities", ""),
    ("masked", "a grammar's mask", ""),
)
NO_GPU = 2  # exit code


@dataclass(frozen=True, slots=True)
class Workload:
    device: str
    requests: int
    lengths: tuple[int, int]  # of a request's prompt and output
    one_prompt: int
    one_tokens: int
    long_prompt: int
    read_bytes: int
    gemm_size: int
    num_blocks: int | None  # in the engine's and the peer's cache; None: as many as fit into memory
    peer: dict[str, int]  # bounds for the peer, if it cannot determine its own


FULL = Workload("cuda", 256, (100, 1024), 128, 256, 8192, 1 << 32, 8192, None, {})
REHEARSAL = Workload("cpu", 6, (5, 12), 8, 8, 64, 1 << 20, 128, 256, {"num_blocks": 16, "max_batch_tokens": 64})


def make_checkpoint(shape: dict[str, Any], directory: Path, device: str) -> Path:
    """Create a checkpoint with random weights, in one file. Generates them on the device, which is faster."""
    config = AutoConfig.for_model(**shape)
    config.dtype = torch.bfloat16
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    generator = torch.Generator(device).manual_seed(0)
    tensors = {}
    for name, parameter in model.named_parameters():  # tied ones are listed once
        made = torch.empty(parameter.shape, dtype=torch.bfloat16, device=device)
        made = made.fill_(1.0) if name.endswith("norm.weight") else made.normal_(0.0, 0.02, generator=generator)
        tensors[name] = made.cpu()
    directory.mkdir()
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(directory)
    return directory


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


class Limits:
    """The limits of the GPU, measured again in each round."""

    def __init__(self, work: Workload) -> None:
        self._work = work
        self._numbers = torch.ones(work.read_bytes // 4, dtype=torch.float32, device=work.device)
        self._matrix = torch.randn(work.gemm_size, work.gemm_size, device=work.device).bfloat16()

    def read(self) -> float:
        return max(self._numbers.nbytes / self._seconds(lambda: self._numbers.sum()) for _ in range(5))

    def gemm(self) -> float:
        operations = 2.0 * self._work.gemm_size**3
        return max(operations / self._seconds(lambda: self._matrix @ self._matrix) for _ in range(5))

    def _seconds(self, run: Any, times: int = 4) -> float:
        synchronize(self._work.device)
        started = time.perf_counter()
        for _ in range(times):
            run()
        synchronize(self._work.device)
        return (time.perf_counter() - started) / times


@dataclass(frozen=True, slots=True)
class BenchmarkRequest:
    prompt: list[int]
    max_tokens: int


def make_requests(work: Workload, vocab_size: int) -> list[BenchmarkRequest]:
    rng = random.Random(0)

    def length() -> int:
        return rng.randint(*work.lengths)

    return [
        BenchmarkRequest(
            [rng.randrange(vocab_size) for _ in range(rng.randint(*work.lengths))], rng.randint(*work.lengths)
        )
        for _ in range(work.requests)
    ]


class Load:
    def __init__(self, model_dir: Path, work: Workload) -> None:
        self._work = work
        self.engine = Engine.load(
            EngineConfig(
                model_dir=model_dir,
                device=work.device,
                num_blocks=work.num_blocks,
                max_model_len=max(work.long_prompt, 2 * work.lengths[1], work.one_prompt + work.one_tokens) + 16,
            )
        )
        self.vocab_size = self.engine.config.model.vocab_size
        self._rng = random.Random(1)
        self._count = 0

    def prompt(self, length: int) -> list[int]:
        """A new random prompt, so that none is in the prefix cache."""
        return [self._rng.randrange(self.vocab_size) for _ in range(length)]

    def add(self, prompt: list[int], max_tokens: int) -> None:
        self._count += 1
        # Sampled at this temperature, as in nano-vllm's benchmark.
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0.6, seed=self._count)
        self.engine.add(Request(f"r{self._count}", prompt, sampling))

    def finish(self) -> float:
        """Run all requests to their ends. Returns the seconds."""
        started = time.perf_counter()
        while self.engine.has_unfinished:
            self.engine.step()
        return time.perf_counter() - started

    def one(self) -> float:
        """Tokens per second after the first token."""
        self.add(self.prompt(self._work.one_prompt), self._work.one_tokens + 1)
        self.engine.step()
        return self._work.one_tokens / self.finish()

    def many(self, requests: Sequence[BenchmarkRequest]) -> float:
        for request in requests:
            self.add(request.prompt, request.max_tokens)
        seconds = self.finish()
        self.engine.scheduler.pool.clear()  # so that the next round computes the same prompts again
        return sum(request.max_tokens for request in requests) / seconds

    def sampled(self, count: int = 64) -> dict[str, float]:
        """Output tokens per second of requests with each of `SAMPLINGS`, and of ones that follow a grammar."""
        rates = {}
        every_other = TokenSet(range(0, self.vocab_size, 2), self.vocab_size)
        for name, params in (SAMPLINGS | {"masked": {}}).items():
            for _ in range(min(count, self._work.requests)):
                self._count += 1
                sampling = SamplingParams(max_tokens=self._work.one_tokens, temperature=0.6, seed=self._count, **params)
                prompt, grammar = self.prompt(self._work.one_prompt), every_other if name == "masked" else None
                self.engine.add(Request(f"r{self._count}", prompt, sampling, grammar=grammar))
            rates[name] = min(count, self._work.requests) * self._work.one_tokens / self.finish()
        return rates

    def cold_and_warm(self) -> tuple[float, float]:
        shared = self.prompt(self._work.long_prompt - self.engine.config.block_size)
        self.add(shared + self.prompt(self.engine.config.block_size), 1)
        cold = self.finish()
        self.add(shared + self.prompt(self.engine.config.block_size), 1)
        return cold, self.finish()


def measure(model_dir: Path, work: Workload, rounds: int) -> tuple[Size, dict[str, float]]:
    """The best of all rounds: rates per second, and seconds. Compiles the kernels before the first round."""
    started = time.perf_counter()
    load = Load(model_dir, work)
    start, limits = time.perf_counter() - started, Limits(work)
    requests = make_requests(work, load.vocab_size)
    load.many(requests)
    load.cold_and_warm()
    best: dict[str, float] = {"start": start}
    for _ in range(rounds):
        cold, warm = load.cold_and_warm()
        rates = {"read": limits.read(), "gemm": limits.gemm(), "one": load.one(), "many": load.many(requests)}
        rates |= load.sampled()
        best |= {name: max(best.get(name, 0.0), rate) for name, rate in rates.items()}
        best["ttft"], best["warm"] = min(best.get("ttft", cold), cold), min(best.get("warm", warm), warm)
    return Size(load.engine.config.model), best


def measure_peer(model_dir: Path, work: Workload, rounds: int) -> float:
    """Output tokens per second of transformers' continuous batching, with the same requests and temperature."""
    model: Any = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.bfloat16, attn_implementation="sdpa")
    model = model.to(work.device).eval()
    requests = make_requests(work, model.config.vocab_size)
    generation = GenerationConfig(
        max_new_tokens=work.lengths[1], do_sample=True, temperature=0.6, top_k=0, eos_token_id=-1, pad_token_id=0
    )
    peer: dict[str, Any] = work.peer
    bounds = ContinuousBatchingConfig(max_requests_per_batch=work.requests, allow_block_sharing=False, **peer)
    best = 0.0
    with model.continuous_batching_context_manager(
        generation_config=generation, continuous_batching_config=bounds, block=True, timeout=60
    ) as manager:
        for number in range(rounds + 1):
            started = time.perf_counter()
            for i, request in enumerate(requests):
                manager.add_request(request.prompt, f"{number}-{i}", max_new_tokens=request.max_tokens, eos_token_id=-1)
            tokens, unfinished = 0, len(requests)
            while unfinished:
                result = manager.get_result(timeout=1)
                if result is not None and result.is_finished():
                    if result.error is not None:
                        raise RuntimeError(f"transformers' continuous batching failed: {result.error}")
                    tokens += len(result.generated_tokens)
                    unfinished -= 1
                elif result is None and not manager.is_running():
                    raise RuntimeError("transformers' continuous batching ended before its requests")
            assert tokens == sum(request.max_tokens for request in requests), (
                "the peer generated another number of tokens"
            )
            if number:  # the first round is a warm-up
                best = max(best, tokens / (time.perf_counter() - started))
    return best


def make_rows(name: str, work: Workload, size: Size, best: dict[str, float]) -> list[Row]:
    """The figures as ratios to their limits, with their goals."""
    context = work.one_prompt + work.one_tokens / 2
    one = best["read"] / (size.weight_bytes + context * size.token_bytes)
    ttft = size.prompt_operations(work.long_prompt) / best["gemm"]
    rows = [
        Row("one sequence", f"{best['one']:.1f} tok/s", best["one"] / one, f"limit {one:.1f}", ONE_GOALS.get(name, "")),
        Row(f"TTFT, {work.long_prompt} tokens", f"{best['ttft'] * 1e3:.1f} ms", ttft / best["ttft"],
            f"limit {ttft * 1e3:.1f}", ""),
        Row("TTFT, warm", f"{best['warm'] * 1e3:.1f} ms", best["warm"] / best["ttft"], "cold", ""),
    ]  # fmt: skip
    for key, what, goal in SAMPLED:
        rows.append(Row(f"64 with {what}", f"{best[key]:.0f} tok/s", best[key] / best["plain"], "without", goal))
    return [*rows, peer_row(work, best)]


def peer_row(work: Workload, best: dict[str, float]) -> Row:
    what, many = f"{work.requests} requests", f"{best['many']:.0f} tok/s"
    if peer := best.get("peer"):
        return Row(what, many, best["many"] / peer, f"peer {peer:.0f}", PEER_GOAL)
    return Row(what, many, 1.0, "itself", "")


def machine(device: str) -> str:
    name = torch.cuda.get_device_name() if device == "cuda" else "a rehearsal on a CPU"
    return f"{name}, torch {torch.__version__}, {'with' if HAS_TRITON else 'without'} Triton"


def free_memory() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(description="The engine on this GPU, beside the GPU's own limits and a peer.")
    parser.add_argument("--shapes", nargs="+", choices=[*SHAPES], default=[*SHAPES])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--without-peer", action="store_true", help="skip transformers' continuous batching")
    parser.add_argument("--rehearse", action="store_true", help="run tiny shapes on the CPU, to test the script")
    parser.add_argument("--result", type=Path, help="a file for the figures")
    args = parser.parse_args()
    work = REHEARSAL if args.rehearse else FULL
    if work.device == "cuda" and not torch.cuda.is_available():
        print("no CUDA device found (--rehearse runs the script with tiny shapes on the CPU)", file=sys.stderr)
        sys.exit(NO_GPU)
    print(machine(work.device))
    figures: dict[str, Any] = {}
    for name in args.shapes:
        with tempfile.TemporaryDirectory() as directory:
            shape = {**SHAPES[name], **(TINY if args.rehearse else {})}
            model_dir = make_checkpoint(shape, Path(directory) / name, work.device)
            size, best = measure(model_dir, work, args.rounds)
            free_memory()
            limits = f"read {best['read'] / 1e9:.0f} GB/s, gemm {best['gemm'] / 1e12:.1f} TFLOP/s"
            print(f"\n{name}: ready after {best['start']:.1f} s; {limits}")
            rows = make_rows(name, work, size, best)
            for row in rows:
                show(row)
            figures[name] = {"best": best, "judged": [asdict(row) for row in rows]}
            save(args.result, work, args.rounds, figures)  # before the peer runs, which may exceed the time limit
            if not args.without_peer:
                best["peer"] = measure_peer(model_dir, work, args.rounds)
                free_memory()
                show(row := peer_row(work, best))
                figures[name]["judged"][-1] = asdict(row)
                save(args.result, work, args.rounds, figures)


def show(row: Row) -> None:
    print(f"  {row.what:20}{row.figure:>16}{row.ratio:8.2f} of {row.of:14}{row.goal:>10}", flush=True)


def save(path: Path | None, work: Workload, rounds: int, figures: dict[str, Any]) -> None:
    if path is None:
        return
    date = datetime.now(UTC).date().isoformat()
    result = {"machine": machine(work.device), "date": date, "rounds": rounds, "figures": figures}
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
