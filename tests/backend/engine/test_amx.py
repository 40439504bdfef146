"""An engine at the AMX level, whose kernels compute prompts, experts and quantised weights differently."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from backend.engine.config import EngineConfig
from backend.engine.engine import Engine
from backend.engine.request import Request
from backend.engine.sampling_params import SamplingParams
from backend.native import library
from tests.backend.checkpoints import VOCAB_SIZE, build_model, save
from tests.backend.engine.test_decode_programs import history
from tests.backend.levels import AMX, library_of

# Sizes that fill whole tiles and panels. A small mixture chooses all experts, since rounding could change the choice.
SHAPE: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 192, "head_dim": 32}
FAMILIES: dict[str, dict[str, Any]] = {
    "gemma2": {},
    "gpt-oss": {"intermediate_size": 64, "num_experts_per_tok": 4},
    "qwen3-moe": {"moe_intermediate_size": 64},
}
OPTIONS: list[dict[str, Any]] = [
    {},
    {"quantization": "int8"},
    {"quantization": "int4"},
    {"kv_cache_dtype": "int8", "quantization": "int8"},
]
PROMPTS = [[(5 * i * i + i + n) % VOCAB_SIZE for i in range(length)] for n, length in enumerate((150, 33, 1, 70))]


@pytest.fixture(scope="module", params=FAMILIES)
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = build_model(request.param, **SHAPE | FAMILIES[request.param])
    return save(model, tmp_path_factory.mktemp(request.param))


@pytest.fixture
def load(directory: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Engine]:
    def load(level: str, **options: Any) -> Engine:
        monkeypatch.setattr(library, "load", lambda: library_of(level))
        defaults: dict[str, Any] = {"dtype": "bfloat16", "num_threads": 2, "num_blocks": 64, "max_model_len": 256}
        engine = Engine.load(EngineConfig(model_dir=directory, device="cpu", **(defaults | options)))
        torch.set_num_threads(1)  # two threads of torch wait actively for each other at every operation
        return engine

    return load


def scores(engine: Engine) -> torch.Tensor:
    """Log-probabilities of all prompt tokens, computed in chunks."""
    sampling = SamplingParams(max_tokens=8, temperature=0.0, prompt_logprobs=0)
    for i, prompt in enumerate(PROMPTS):
        engine.add(Request(f"r{i}", prompt, sampling))
    found: dict[str, list[float]] = {}
    while engine.has_unfinished:
        for output in engine.step():
            if output.prompt_logprobs is not None:
                found[output.request_id] = [entry.logprob for entry in output.prompt_logprobs if entry]
    engine.check_integrity()
    return torch.tensor([score for name in sorted(found) for score in found[name]])


@pytest.mark.slow
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_prompts(load: Callable[..., Engine], options: dict[str, Any]) -> None:
    """As torch computes them, up to bfloat16 rounding."""
    chunks = {"max_num_seqs": 8, "max_num_batched_tokens": 64}
    ours = scores(load(AMX, **chunks, **options))
    theirs = scores(load(AMX, **chunks, **options, ops="reference", attention="sdpa"))
    assert len(ours) == sum(len(prompt) - 1 for prompt in PROMPTS)
    assert (ours - theirs).abs().mean() < 0.4 * theirs.std()


@pytest.mark.slow
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_recorded_steps(load: Callable[..., Engine], options: dict[str, Any]) -> None:
    """Bitwise the same as unrecorded steps."""
    ours, theirs = (history(load(AMX, enforce_eager=eager, **options), seed=1) for eager in (False, True))
    assert ours == theirs
    assert any(len(logprobs) > 4 for logprobs in ours.values())
