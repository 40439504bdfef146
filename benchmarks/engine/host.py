"""What the host spends on a decode step besides the model: `python -m benchmarks.engine.host`.

A real engine (scheduler, block pool, batch, sampling parameters, outputs), whose model and sampling kernels return at
once. What is left is the host's work: on a GPU it must fit beside the step, and on a CPU it is added to it. Sequences
of 100 to 1,124 tokens decode; a sixteenth of them needs a new block in each step. The figure is the CPU time of the
engine's thread per step, as the median of all steps, in milliseconds. With `SEQUENCES` sequences it must be at most
`MUST_MS`.

The same is measured for captured steps (graphs.py), which write their inputs to buffers and are launched early, with
graphs that do nothing. It leaves out what CUDA adds: two launches, and copies to the device and back.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from backend.engine.batch import Batch
from backend.engine.captured_steps import DecodeStep
from backend.engine.config import EngineConfig
from backend.engine.engine import Engine
from backend.engine.graph_runner import GraphRunner
from backend.engine.graphs import GraphCapture
from backend.engine.paged_model import PagedModel
from backend.engine.request import Request
from backend.engine.sampling_params import SamplingParams
from backend.ops.base import Ops
from benchmarks.engine.cpu import HOLLOW, cpu_name
from benchmarks.engine.shapes import VOCAB_SIZE, make_checkpoint

MUST_MS = 1.0
SEQUENCES = 256
WARM_UP_STEPS, STEPS = 40, 200
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 0.8, "top_p": 0.9, "top_k": 40},
}
GRAPH_KINDS: dict[str, dict[str, Any]] = KINDS | {
    "penalised": {**KINDS["sampled"], "presence_penalty": 0.5, "repetition_penalty": 1.1},
    "scored": {**KINDS["sampled"], "logprobs": 5},
}


class InstantModel(PagedModel):
    """Returns tokens without computing anything."""

    def __init__(self, model: PagedModel) -> None:
        vars(self).update(vars(model))
        self.ops = cast(Ops, InstantOps())

    def next_tokens(self, batch: Batch, is_interrupted: Callable[[], bool] | None = None) -> Tensor:
        if is_interrupted:
            is_interrupted()
        return torch.full((len(batch.sampled),), 7)

    def forward(self, batch: Batch, is_interrupted: Callable[[], bool] | None = None) -> Tensor:
        if is_interrupted:
            is_interrupted()
        return torch.empty(len(batch.attention.query_lens), 1)

    def scores(self, hidden: Tensor) -> Tensor:
        return hidden

    def greedy_tokens(self, hidden: Tensor) -> Tensor:
        return torch.full((len(hidden),), 7)


class InstantOps:
    """The sampling kernel that the kinds use."""

    def choose(self, scores: Tensor, random: Any, penalties: Any) -> Tensor:
        return torch.full((len(scores),), 7)


class NothingCaptured(GraphCapture):
    """Steps that compute nothing."""

    def __call__(self, step: DecodeStep, size: int) -> DecodeStep:
        return lambda seq_lens: None


def main() -> None:
    parser = argparse.ArgumentParser(description="What the host spends on a decode step besides the model.")
    parser.add_argument("--sequences", type=int, nargs="+", default=[16, 64, SEQUENCES])
    parser.add_argument("--result", type=Path, help="a file for the figures")
    args = parser.parse_args()
    print(machine := f"{cpu_name()}, Python {platform.python_version()}")
    figures: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as directory:
        model_dir = make_checkpoint("tiny", Path(directory) / "hollow", **HOLLOW)
        kinds = [(kind, kind, False) for kind in KINDS]
        kinds += [(f"{kind}, captured", kind, True) for kind in GRAPH_KINDS]
        for name, kind, captured in kinds:
            figures[name] = {
                str(count): round(measure(model_dir, kind, count, captured), 3) for count in args.sequences
            }
            print(name, ", ".join(f"{count} sequences {ms} ms" for count, ms in figures[name].items()))
    worst = max(found.get(str(SEQUENCES), 0.0) for found in figures.values())
    print(f"at most {MUST_MS} ms a step of {SEQUENCES} sequences: {'holds' if worst <= MUST_MS else 'FAILS'}")
    if args.result:
        result = {"machine": machine, "date": datetime.now(UTC).date().isoformat(), "ms a step": figures}
        args.result.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def measure(model_dir: Path, kind: str, count: int, captured: bool) -> float:
    """Milliseconds of CPU time per step, the median."""
    config = EngineConfig(
        model_dir=model_dir, device="cpu", num_threads=1, num_blocks=96 * count, max_num_seqs=count,
        max_num_batched_tokens=8192,
    )  # fmt: skip
    engine = Engine.load(config)
    if captured:
        engine.runner = GraphRunner(engine.config, NothingCaptured(), engine.runner.model)
    else:
        engine.runner.model = InstantModel(engine.runner.model)
    for i in range(count):
        prompt = [(i * 7919 + j * 104_729) % VOCAB_SIZE for j in range(100 + 4 * i % 1024)]
        params = GRAPH_KINDS[kind]
        sampling = SamplingParams(max_tokens=WARM_UP_STEPS + STEPS + 10, stop_token_ids=frozenset({1}), **params)
        engine.add(Request(f"r{i}", prompt, sampling))
    while any(request.num_output_tokens < WARM_UP_STEPS for request in engine.scheduler.running) or not (
        engine.scheduler.running
    ):
        engine.step()
    times = []
    for _ in range(STEPS):
        began = time.thread_time()
        engine.step()
        times.append(time.thread_time() - began)
    return statistics.median(times) * 1e3


if __name__ == "__main__":
    main()
