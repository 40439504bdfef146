"""Tensor parallelism over NCCL: two GPUs compute the same tokens as one. Needs two GPUs; no CPU stands in for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from backend.engine.config import EngineConfig
from backend.engine.engine import Engine
from tests.gpu_kernels.test_engine import tokens_of

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two GPUs")


@contextmanager
def loaded(directory: Path, size: int, **options: Any) -> Iterator[Engine]:
    limits: dict[str, Any] = {"num_blocks": 64, "block_size": 4, "max_num_seqs": 4, "max_num_batched_tokens": 12}
    engine = Engine.load(
        EngineConfig(model_dir=directory, device="cuda", dtype="float32", tensor_parallel_size=size, **limits | options)
    )
    try:
        yield engine
    finally:
        engine.runner.model.close()


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2", "qwen3-moe", "gpt-oss", "deepseek-v3"])
def test_two_gpus_compute_the_tokens_of_one(name: str, special: bool, checkpoint_dir: Callable[[str], Path]) -> None:
    with loaded(checkpoint_dir(name), 1) as alone:
        expected = tokens_of(alone, special)
    with loaded(checkpoint_dir(name), 2) as divided:
        assert tokens_of(divided, special) == expected
