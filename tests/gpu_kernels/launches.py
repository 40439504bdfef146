"""Reports which kernels the engine launches on a GPU that need not be present: while it starts, and for requests.

    python -m tests.gpu_kernels.launches CHECKPOINT OPTIONS        one line of JSON: the kernels of both phases, by hash

Kernels are only compiled, so the answers to the requests are meaningless.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from backend.engine import config, engine
from backend.engine.captured_steps import DecodeStep
from backend.engine.config import EngineConfig
from backend.engine.engine import Engine
from backend.engine.graph_runner import GraphRunner
from backend.engine.graphs import NoCapture
from backend.engine.request import Request
from backend.engine.sampling_params import SamplingParams
from backend.ops.triton import TritonOps
from tests.backend.checkpoints import VOCAB_SIZE, build_model, save
from tests.gpu_kernels.compilation import only_compile


class RunOnce(NoCapture):
    """Runs the step once, as a capture does."""

    def __call__(self, step: DecodeStep, size: int) -> DecodeStep:
        def uncaptured(seq_lens: Sequence[int]) -> None:
            step(seq_lens)

        uncaptured((1,) * size)
        return uncaptured


def launches(model_dir: Path, options: dict[str, Any]) -> dict[str, dict[str, str]]:
    found: dict[str, dict[str, str]] = {"before": {}, "serving": {}}
    phase = "before"
    only_compile(90, lambda name, kernel: found[phase].__setitem__(kernel.hash, name))
    vars(config)["runs_triton"] = lambda device: True
    ops: Any = TritonOps
    draw, sample_rows = ops.draw, ops.sample_rows
    # Tokens within the vocabulary, since no kernel has written any.
    ops.draw = lambda *args: draw(*args).zero_()
    ops.sample_rows = lambda *args, **options: sample_rows(*args, **options).zero_()
    vars(engine)["create_runner"] = lambda resolved: GraphRunner(resolved, RunOnce())
    limits: dict[str, Any] = {"num_blocks": 128, "max_num_seqs": 8, "max_num_batched_tokens": 64, "num_threads": 1}
    shared: dict[str, Any] = {"device": "cpu", "dtype": "bfloat16", "attention": "triton", "ops": "triton"}
    loaded = Engine.load(EngineConfig(model_dir=model_dir, **limits, **shared, **options))
    phase = "serving"
    for i in range(7):
        prompt = [(i * j + 3) % VOCAB_SIZE for j in range(3 + 11 * i)]
        special: dict[str, Any] = {"presence_penalty": 0.5, "logprobs": 3} if i == 3 else {}
        loaded.add(Request(f"r{i}", prompt, SamplingParams(max_tokens=9, temperature=0.7 * (i % 2), **special)))
        loaded.step()  # prompts together with decodes, of odd and even lengths
        loaded.step()
    while loaded.has_unfinished:
        loaded.step()
    return found


def main() -> None:
    name, options = sys.argv[1], json.loads(sys.argv[2])
    with tempfile.TemporaryDirectory() as directory:
        print(json.dumps(launches(save(build_model(name), Path(directory)), options)))


if __name__ == "__main__":
    main()
