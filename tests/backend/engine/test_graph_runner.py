"""Which runner a configuration gets, what its warm-up includes, and what it does if nothing can be captured."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from backend.engine import graph_runner
from backend.engine.batch import Batch
from backend.engine.captured_steps import DecodeStep
from backend.engine.config import EngineConfig
from backend.engine.graph_runner import GraphRunner, create_runner
from backend.engine.graphs import NoCapture
from backend.engine.paged_model import PagedModel
from backend.engine.resolved_config import ResolvedConfig
from backend.native.recording import StopCheck


def test_a_step_that_cannot_be_captured_runs_uncaptured(
    checkpoint_dir: Callable[[str], Path], caplog: pytest.LogCaptureFixture
) -> None:
    class Failing(NoCapture):
        def __call__(self, step: DecodeStep, size: int) -> DecodeStep:
            raise RuntimeError("operation not permitted when stream is capturing")

    config = EngineConfig(model_dir=checkpoint_dir("llama"), device="cpu", num_blocks=64, max_num_seqs=2).resolve()
    runner = GraphRunner(config, Failing())
    assert "not permitted" in caplog.text
    assert runner.uses_lookahead


def test_warm_up_includes_the_longest_chunk(
    checkpoint_dir: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths: list[int] = []
    forward = PagedModel.forward

    def counted(self: PagedModel, batch: Batch, is_interrupted: StopCheck | None = None) -> torch.Tensor:
        lengths.append(len(batch.input_ids))
        return forward(self, batch, is_interrupted)

    monkeypatch.setattr(PagedModel, "forward", counted)
    for most, model_len in ((300, 400), (400, 300)):
        lengths.clear()
        limits: dict[str, Any] = {"max_num_batched_tokens": most, "max_model_len": model_len, "num_blocks": 64}
        GraphRunner(EngineConfig(model_dir=checkpoint_dir("llama"), device="cpu", **limits).resolve(), NoCapture())
        assert max(lengths) == 300


@pytest.mark.parametrize("needs_host_sync", [False, True])
@pytest.mark.parametrize("enforce_eager", [False, True])
@pytest.mark.parametrize("generates", [False, True])
def test_a_model_with_host_syncs_or_without_an_output_head_is_not_captured(
    monkeypatch: pytest.MonkeyPatch, needs_host_sync: bool, enforce_eager: bool, generates: bool
) -> None:
    model = SimpleNamespace(needs_host_sync=needs_host_sync, capture_of_ranks=lambda capture: capture)
    plain: Any = SimpleNamespace(model=model)
    captured: list[object] = []
    monkeypatch.setattr(graph_runner, "Runner", lambda config: plain)
    monkeypatch.setattr(graph_runner, "CudaCapture", lambda device: None)
    monkeypatch.setattr(graph_runner, "GraphRunner", lambda config, capture, model: captured.append(model))
    config: Any = SimpleNamespace(
        device=torch.device("cuda"),
        attention="triton",
        enforce_eager=enforce_eager,
        model=SimpleNamespace(has_lm_head=generates),
    )
    runner = create_runner(config)
    if needs_host_sync or enforce_eager or not generates:
        assert runner is plain
        assert not captured
    else:
        assert captured == [plain.model]  # the model is not loaded again


@pytest.mark.parametrize(
    ("checkpoint", "syncs"), [("llama", False), ("qwen3-moe", True), ("gpt-oss", True), ("deepseek-v3", True)]
)
def test_sequential_experts_need_host_syncs(
    checkpoint_dir: Callable[[str], Path], checkpoint: str, syncs: bool
) -> None:
    config = EngineConfig(model_dir=checkpoint_dir(checkpoint), device="cpu", num_blocks=64, ops="reference").resolve()
    assert create_runner(config).model.needs_host_sync == syncs


def test_a_cpu_runs_without_graphs(checkpoint_dir: Callable[[str], Path]) -> None:
    config: ResolvedConfig = EngineConfig(model_dir=checkpoint_dir("llama"), device="cpu", num_blocks=64).resolve()
    assert type(create_runner(config)) is not GraphRunner
    assert torch.device("cpu") == config.device
