"""CPU cost of sampling per step, by request options, beside one pass over all logits and one sort of them.

    python benchmarks/engine/sampler.py [--rounds 7] [--vocab 151936] [--result FILE]

Runs in interleaved rounds on one thread, for each number of rows. A figure is the minimum of all rounds, in
milliseconds of the thread's CPU time:

    LOOK          torch's `argmax`, the minimum cost of any sampling
    SORT          torch's sort of all rows, with which a plain top-p begins
    options       each with the kernels, if they are available, and with torch
    peaked, flat  logits of a confident model, with most of the mass on a few tokens; and logits as at a high
                  temperature, with thousands of tokens in the nucleus
    logprobs      of the chosen tokens alone, or of so many of the likeliest as well
    grammar       applying a mask
    walk          computing one row's mask, on the other thread, for a JSON schema with the demo model's vocabulary of
                  2048
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from backend.engine import grammar
from backend.engine.grammar import GrammarCompiler
from backend.engine.masks import AllowedTokens
from backend.engine.request import Request
from backend.engine.sampler import sample
from backend.engine.sampling_batch import NextToken, make_sampling_batch
from backend.engine.sampling_params import SamplingParams
from backend.native import library
from backend.ops import create_ops
from backend.ops.base import Ops

CPU = torch.device("cpu")
ROWS = (1, 16)
PROMPT_TOKENS, OUTPUT_TOKENS = 1000, 200
TOKENIZER = Path(__file__).parents[2] / "backend" / "demo_model" / "weights" / "tokenizer.json"
SCHEMA = {"type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "integer"}}}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "greedy": ("peaked", {"temperature": 0.0}),
    "temperature": ("peaked", {}),
    "top_p": ("peaked", {"top_p": 0.9}),
    "top_p, flat": ("flat", {"top_p": 0.9}),
    "top_p and top_k": ("peaked", {"top_p": 0.9, "top_k": 40}),
    "top_k of 1000": ("peaked", {"top_k": 1000}),
    "min_p": ("peaked", {"min_p": 0.05}),
    "penalties": ("peaked", {"temperature": 0.0, "repetition_penalty": 1.1, "frequency_penalty": 0.1}),
    "logit bias": ("peaked", {"temperature": 0.0, "logit_bias": dict.fromkeys(range(50), -1.0)}),
    "all of it": (
        "peaked",
        {"top_p": 0.9, "top_k": 40, "min_p": 0.01, "repetition_penalty": 1.1, "logit_bias": {7: 1.0}},
    ),
    "logprobs": ("peaked", {"temperature": 0.0, "logprobs": 0}),
    "logprobs, 5": ("peaked", {"temperature": 0.0, "logprobs": 5}),
    "logprobs, 20": ("peaked", {"temperature": 0.0, "logprobs": 20}),
    "grammar": ("peaked", {"temperature": 0.0}),
}


def make_requests(count: int, vocab_size: int, sampling: dict[str, Any]) -> list[Request]:
    requests = []
    for seed in range(count):
        prompt = [(seed + i * 7919) % vocab_size for i in range(PROMPT_TOKENS)]
        request = Request(f"r{seed}", prompt, SamplingParams(max_tokens=1000, seed=seed, **sampling))
        for i in range(OUTPUT_TOKENS):
            request.append((seed * 31 + i * 104_729) % vocab_size)
        requests.append(request)
    return requests


@dataclass(frozen=True, slots=True)
class Case:
    run: Callable[[Tensor], object]
    given: Tensor  # `run` gets a copy, which it may change


def cases(rows: int, vocab_size: int) -> dict[str, Case]:
    generator = torch.Generator().manual_seed(rows)
    noise = torch.randn(rows, vocab_size, generator=generator)
    logits = {"peaked": noise * 2, "flat": noise * 3}
    logits["peaked"][:, :40] += torch.linspace(22, 8, 40)
    words = torch.randint(-(2**31), 2**31, (rows, -(-vocab_size // 32)), generator=generator).int()
    allowed = AllowedTokens(torch.arange(rows), words, {})
    members = {"": create_ops("native")} if library.load() else {}
    members["torch: "] = create_ops("reference")

    def chosen(requests: list[Request], mask: AllowedTokens | None, ops: Ops) -> Callable[[Tensor], object]:
        return lambda given: sample(given, make_sampling_batch([*map(NextToken, requests)], vocab_size, CPU), mask, ops)

    made = {
        "LOOK": Case(lambda given: given.argmax(dim=-1).tolist(), logits["peaked"]),
        "SORT": Case(lambda given: given.sort(dim=-1, descending=True), logits["peaked"]),
    }
    for name, (which, sampling) in KINDS.items():
        requests = make_requests(rows, vocab_size, sampling)
        for prefix, ops in members.items():
            made[prefix + name] = Case(chosen(requests, allowed if name == "grammar" else None, ops), logits[which])
    return made


def walk() -> Case:
    compiler = GrammarCompiler(TOKENIZER.read_text(encoding="utf-8"), 2048, [0])
    matcher = compiler.compile(grammar.json_schema(SCHEMA)).start()
    words = torch.zeros(64, dtype=torch.int32)
    return Case(lambda given: matcher.fill_mask(given.data_ptr(), given.nbytes), words)


def measure(made: dict[str, Case], rounds: int) -> dict[str, float]:
    minima = dict.fromkeys(made, float("inf"))
    for _ in range(rounds):
        for name, case in made.items():
            given = case.given.clone()
            started = time.thread_time()
            case.run(given)
            minima[name] = min(minima[name], time.thread_time() - started)
    return {name: round(seconds * 1e3, 3) for name, seconds in minima.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description="CPU cost of sampling per step, by request options.")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--vocab", type=int, default=151_936, help="tokens in the vocabulary (default: Qwen's)")
    parser.add_argument("--result", type=Path, help="a file for the figures")
    args = parser.parse_args()
    torch.set_num_threads(1)
    machine = f"{platform.processor() or platform.machine()}, {os.cpu_count()} CPUs, torch {torch.__version__}"
    print(f"{machine}; ms of CPU per step, vocabulary of {args.vocab}")
    figures = {str(rows): measure(cases(rows, args.vocab), args.rounds) for rows in ROWS}
    figures["1"] |= measure({"walk": walk()}, 10 * args.rounds)
    print(f"{'':22}" + "".join(f"{rows + ' rows':>12}" for rows in figures))
    for name in figures["1"]:
        print(f"{name:22}" + "".join(f"{of_rows.get(name, float('nan')):12.3f}" for of_rows in figures.values()))
    if args.result:
        date = datetime.now(UTC).date().isoformat()
        result = {"machine": machine, "date": date, "unit": "ms", "vocab": args.vocab, "rows": figures}
        args.result.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    with torch.inference_mode():
        main()
