"""The whole engine as on a GPU, with Triton kernels and captured steps: the same tokens as the reference."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from backend.engine import engine as engine_module
from backend.engine.config import EngineConfig
from backend.engine.engine import Engine
from backend.engine.graph_runner import GraphRunner, create_runner
from backend.engine.graphs import CudaCapture, GraphCapture, NoCapture
from backend.engine.request import Request
from backend.engine.sampling_params import SamplingParams
from backend.triton_runtime import runs_triton

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [
    pytest.mark.skipif(not runs_triton(torch.device(DEVICE)), reason="no GPU, and no TRITON_INTERPRET=1"),
    pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning"),  # by the interpreter, for sigmoid
]

PROMPTS = [[3], [(7 * i * i + i) % 256 for i in range(26)], [9, 8, 7, 6]]


SPECIAL: list[dict[str, Any]] = [
    {"repetition_penalty": 1.3, "frequency_penalty": 0.5, "logprobs": 3},
    {"top_p": 0.9, "logit_bias": {7: 3.0, 9: -100.0}, "presence_penalty": 0.7, "min_tokens": 3, "logprobs": 20},
    {"stop_token_ids": frozenset(range(0, 256, 3)), "min_tokens": 4},
]


def tokens_of(engine: Engine, special: bool = False) -> list[list[int]]:
    """The requests arrive one after the other, so that steps have prompts, chunks and decodes side by side."""
    params: list[dict[str, Any]] = SPECIAL if special else [{}, {}, {}]
    requests = [
        Request(f"r{i}", prompt, SamplingParams(max_tokens=5, temperature=0.7 * (i % 2), seed=i, **params[i]))
        for i, prompt in enumerate(PROMPTS)
    ]
    for request in requests:
        engine.add(request)
        engine.step()
        engine.step()
    while engine.has_unfinished:
        engine.step()
    engine.check_integrity()
    return [request.token_ids[request.num_prompt_tokens :] for request in requests]


@pytest.mark.parametrize(
    ("checkpoint", "options"),
    [
        ("llama", {}),
        ("llama", {"special": True}),
        ("llama", {"quantization": "int8"}),
        ("llama", {"quantization": "int4"}),
        ("llama", {"kv_cache_dtype": "int8"}),
        ("qwen3", {}),
        ("gemma2", {}),
        ("mixtral", {}),
        ("qwen3-moe", {}),
        ("qwen3-moe", {"quantization": "int8"}),
        ("gpt-oss", {}),
        ("deepseek-v2", {}),
        ("deepseek-v3", {}),
    ],
    ids=str,
)
def test_tokens_are_those_of_the_reference(
    checkpoint_dir: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, checkpoint: str, options: dict[str, Any]
) -> None:
    options = dict(options)
    shared: dict[str, Any] = {
        "dtype": "float32",
        "num_blocks": 64,
        "block_size": 4,
        "max_num_seqs": 4,
        "num_threads": 1,
    }
    special = options.pop("special", False)
    shared |= {"model_dir": checkpoint_dir(checkpoint), "device": DEVICE, "max_num_batched_tokens": 12, **options}
    expected = tokens_of(Engine.load(EngineConfig(attention="sdpa", ops="reference", **shared)), special)
    capture: GraphCapture = CudaCapture(torch.device("cuda", 0)) if DEVICE == "cuda" else NoCapture()
    monkeypatch.setattr(engine_module, "create_runner", lambda config: GraphRunner(config, capture))
    engine = Engine.load(EngineConfig(attention="triton", ops="triton", **shared))
    assert not engine.runner.model.needs_host_sync
    assert tokens_of(engine, special) == expected


def test_experts_in_fp8_need_no_host_sync(checkpoint_dir: Callable[[str], Path]) -> None:
    """The tokens are not compared, because the reference rounds the inputs of experts."""
    limits: dict[str, Any] = {"num_blocks": 64, "max_num_seqs": 4, "num_threads": 1}
    config = EngineConfig(
        model_dir=checkpoint_dir("qwen3-moe"),
        device=DEVICE,
        attention="triton",
        ops="triton",
        quantization="fp8",
        **limits,
    )
    engine = Engine.load(config)
    assert not engine.runner.model.needs_host_sync
    assert all(len(tokens) == 5 for tokens in tokens_of(engine))


def test_triton_is_chosen_on_a_gpu(checkpoint_dir: Callable[[str], Path]) -> None:
    if DEVICE == "cpu":
        pytest.skip("no GPU")
    config = EngineConfig(model_dir=checkpoint_dir("llama"), num_blocks=64).resolve()
    assert (config.attention, config.ops) == ("triton", "triton")
    assert type(create_runner(config)) is GraphRunner
