"""Tensor parallelism over NCCL: two GPUs compute the same tokens as one. Needs two GPUs; no CPU stands in for them."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from backend.engine.config import EngineConfig
from backend.engine.engine import Engine
from backend.engine.errors import RankFailed
from backend.engine.graph_runner import GraphRunner
from backend.engine.request import Request
from backend.engine.sampling_params import SamplingParams
from tests.backend.parallel.test_faults import followers
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
@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2", "qwen3-moe", "gpt-oss", "deepseek-v3"])
def test_two_gpus_compute_the_tokens_of_one(
    name: str, eager: bool, special: bool, checkpoint_dir: Callable[[str], Path]
) -> None:
    """With graphs that both capture, and kernel by kernel."""
    with loaded(checkpoint_dir(name), 1, enforce_eager=eager) as alone:
        expected = tokens_of(alone, special)
    with loaded(checkpoint_dir(name), 2, enforce_eager=eager) as divided:
        assert isinstance(divided.runner, GraphRunner) != eager
        assert tokens_of(divided, special) == expected


def test_a_killed_rank_ends_the_engine(checkpoint_dir: Callable[[str], Path]) -> None:
    """NCCL does not notice it: the kernels wait until rank 0 aborts them."""
    with loaded(checkpoint_dir("llama"), 2) as engine:
        engine.add(Request("r", [5, 6, 7], SamplingParams(max_tokens=400, temperature=0.0)))
        engine.step()
        (pid,) = followers(os.getpid())
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(RankFailed, match=f"rank 1 of 2 \\(process {pid}\\) was ended by SIGKILL"):
            while True:
                engine.step()
