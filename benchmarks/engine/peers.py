"""The engine beside vLLM on the same CPU, over HTTP: `python -m benchmarks.engine.peers --vllm COMMAND`.

vLLM is not installed with Warmpath: `--vllm` names the command of an environment that has it. Both run as servers all
the time, with the same checkpoint of random weights in bfloat16 and the same number of threads. The same client sends
requests to them alternately: new prompts of token ids, greedy, without an early stop. The figures are the best of all
rounds. `cpu.py` compares the engine with the machine's limits instead.

    one         tokens per second of one sequence after a prompt of 128
    sixteen     tokens per second of 16 concurrent sequences, 256 tokens in and 64 out, including prefill
    ttft        seconds to the first token after a prompt of 1024
    warm        the same for a prompt that begins with an earlier one
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import random
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx2
from tokenizers import Tokenizer, models

from benchmarks.engine.cpu import cpu_name
from benchmarks.engine.shapes import SHAPES, VOCAB_SIZE, make_checkpoint
from benchmarks.warm_paths.stack import running
from benchmarks.warm_paths.vllm import free_ports

OURS, THEIRS = "warmpath", "vllm"
CONTEXT_TOKENS = 4096
ONE_PROMPT, ONE_OUTPUT = 128, 128
BATCH, BATCH_PROMPT, BATCH_OUTPUT = 16, 256, 64
TTFT_PROMPT, SUFFIX_TOKENS = 1024, 16
FIGURES = ("one", "sixteen", "ttft", "warm")
START_SECONDS_MAX = 600.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", required=True, help="command that starts vLLM, such as /opt/vllm/bin/vllm")
    parser.add_argument("--shapes", nargs="+", choices=[*SHAPES], default=[*SHAPES])
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="threads of each server (default: all)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--eager", action="store_true", help="run vLLM without compiling, which takes minutes")
    parser.add_argument("--result", type=Path, help="a file for the figures")
    args = parser.parse_args()
    machine = f"{cpu_name()}, {args.threads} threads, Python {platform.python_version()}"
    print(machine)
    figures = {}
    for shape in args.shapes:
        with tempfile.TemporaryDirectory() as directory:
            model = servable(shape, Path(directory) / "model")
            with (
                ours(Path(directory) / OURS, model, args.threads) as url,
                theirs(args.vllm, Path(directory) / THEIRS, model, args.threads, eager=args.eager) as vllm_url,
            ):
                figures[shape] = measure({OURS: url, THEIRS: vllm_url}, args.rounds)
        print(f"\n{shape:12}{'':>12}{OURS:>12}{THEIRS:>12}{'times':>8}")
        for name, (mine, peer) in compared(figures[shape]).items():
            is_rate = name in ("one", "sixteen")
            unit, scale = ("tok/s", 1.0) if is_rate else ("ms", 1e3)
            times = mine / peer if is_rate else peer / mine
            print(f"  {name:10}{unit:>12}{mine * scale:12.1f}{peer * scale:12.1f}{times:8.2f}")
    if args.result:
        date = datetime.now(UTC).date().isoformat()
        result = {"machine": machine, "date": date, "rounds": args.rounds, "figures": figures}
        args.result.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def servable(shape: str, directory: Path) -> Path:
    """Create a checkpoint with a tokenizer, which servers require. The words of its vocabulary are numbers."""
    make_checkpoint(shape, directory)
    words = {f"w{i}": i for i in range(VOCAB_SIZE)}
    Tokenizer(models.WordLevel(words, unk_token="w0")).save(str(directory / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "w0", "eos_token": "w1"}
    (directory / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return directory


@contextlib.contextmanager
def ours(folder: Path, model: Path, threads: int, *options: str) -> Iterator[str]:
    command = [sys.executable, "-m", "backend", "--model", str(model), "--served-model-name", "m", "--port", "0"]
    command.append("--wait-for-kernels")
    command += ["--dtype", "bfloat16", "--num-threads", str(threads), "--max-model-len", str(CONTEXT_TOKENS)]
    command += options
    with running(command, folder, r"engine ready on (\S+) model") as url:
        yield url


@contextlib.contextmanager
def theirs(command: str, folder: Path, model: Path, threads: int, *, eager: bool) -> Iterator[str]:
    (port,) = free_ports(1)
    options = ["serve", str(model), "--served-model-name", "m", "--dtype", "bfloat16", "--host", "127.0.0.1"]
    options += ["--port", str(port), "--max-model-len", str(CONTEXT_TOKENS), *(["--enforce-eager"] if eager else [])]
    settings = {
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{threads - 1}",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    ready = r"(Application startup complete|Uvicorn running on)"
    with running([command, *options], folder, ready, seconds=START_SECONDS_MAX, **settings):
        yield f"http://127.0.0.1:{port}"


def measure(urls: dict[str, str], rounds: int) -> dict[str, dict[str, float]]:
    """The best of all rounds for each server: rates per second, and seconds."""
    loads = {name: Load(url) for name, url in urls.items()}
    best: dict[str, dict[str, float]] = {name: {} for name in urls}
    for round_number in range(rounds + 1):
        for name, load in loads.items():
            one, sixteen, (ttft, warm) = load.one(), load.sixteen(), load.cold_and_warm()
            if round_number == 0:
                continue  # warm-up
            found = best[name]
            for key, rate in (("one", one), ("sixteen", sixteen)):
                found[key] = max(found.get(key, 0.0), rate)
            for key, seconds in (("ttft", ttft), ("warm", warm)):
                found[key] = min(found.get(key, float("inf")), seconds)
    return best


def compared(best: dict[str, dict[str, float]]) -> dict[str, tuple[float, float]]:
    return {name: (best[OURS][name], best[THEIRS][name]) for name in FIGURES}


class Load:
    """Sends requests to one server. Every prompt is new, except the warm one."""

    def __init__(self, url: str) -> None:
        # llama.cpp closes connections that are kept alive without a notice that the client could see in time.
        limits = httpx2.Limits(max_connections=2 * BATCH, max_keepalive_connections=0)
        self._client = httpx2.Client(base_url=url, timeout=300.0, limits=limits)
        self._random = random.Random(7)

    def one(self) -> float:
        times = self.tokens(self.prompt(ONE_PROMPT), ONE_OUTPUT)
        return (ONE_OUTPUT - 1) / (times[-1] - times[0])

    def sixteen(self) -> float:
        prompts = [self.prompt(BATCH_PROMPT) for _ in range(BATCH)]
        with ThreadPoolExecutor(BATCH) as pool:
            began = time.perf_counter()
            ends = [times[-1] for times in pool.map(lambda prompt: self.tokens(prompt, BATCH_OUTPUT), prompts)]
        return BATCH * BATCH_OUTPUT / (max(ends) - began)

    def cold_and_warm(self) -> tuple[float, float]:
        shared = self.prompt(TTFT_PROMPT)
        return self.first(shared), self.first([*shared, *self.prompt(SUFFIX_TOKENS)])

    def first(self, prompt: list[int]) -> float:
        began = time.perf_counter()
        return self.tokens(prompt, 1)[0] - began

    def prompt(self, length: int) -> list[int]:
        return [self._random.randrange(2, VOCAB_SIZE) for _ in range(length)]

    def tokens(
        self, prompt: list[int], max_tokens: int, stop: threading.Event | None = None, **fields: object
    ) -> list[float]:
        """Times of arrival of the chunks with text. Leaves the stream early if `stop` is set."""
        body: dict[str, Any] = {"model": "m", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
        body |= {"ignore_eos": True, "stream": True, **fields}
        times = []
        with self._client.stream("POST", "/v1/completions", json=body) as reply:
            reply.raise_for_status()
            for line in reply.iter_lines():
                if line.startswith("data: {"):
                    times.append(time.perf_counter())
                if stop is not None and stop.is_set():
                    break
        return times


if __name__ == "__main__":
    main()
