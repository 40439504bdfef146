"""When torch computes until the kernels are compiled, and when the engine waits for them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from backend.engine import config
from backend.engine.config import EngineConfig
from backend.engine.resolved_config import ResolvedConfig
from backend.engine.torch_start import reason_to_wait, with_kernels
from backend.model_files.directory import ModelDirectory
from backend.native import compiler, library

GIB = 1 << 30


@pytest.fixture
def not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "is_compiled", lambda: False)
    monkeypatch.setattr(compiler, "can_write_cache", lambda: True)


@pytest.fixture
def resolve(checkpoint_dir: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> Callable[..., ResolvedConfig]:
    def resolve(**options: Any) -> ResolvedConfig:
        given: dict[str, Any] = {"device": "cpu", "num_blocks": 64, "wait_for_kernels": False} | options
        return EngineConfig(model_dir=checkpoint_dir("llama"), **given).resolve()

    return resolve


@pytest.mark.usefixtures("not_compiled")
def test_torch_computes_until_the_kernels_are_compiled(
    resolve: Callable[..., ResolvedConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library, "load", lambda: pytest.fail("this may compile them"))
    resolved = resolve()
    assert (resolved.ops, resolved.attention, resolved.starts_with_torch) == ("reference", "sdpa", True)
    later = with_kernels(resolved)
    assert (later.ops, later.attention, later.starts_with_torch) == ("native", "native", False)
    assert replace(later, ops="reference", attention="sdpa", starts_with_torch=True) == resolved
    for quantization in ("int8", "int4"):
        assert resolve(quantization=quantization).starts_with_torch


@pytest.mark.usefixtures("not_compiled")
@pytest.mark.parametrize("options", [{"wait_for_kernels": True}, {"ops": "native"}, {"attention": "native"}])
def test_the_engine_waits_if_it_is_asked_to(resolve: Callable[..., ResolvedConfig], options: dict[str, Any]) -> None:
    resolved = resolve(**options)
    assert not resolved.starts_with_torch
    assert library.load() is None or "native" in (resolved.ops, resolved.attention)


def test_compiled_kernels_are_used_at_once(resolve: Callable[..., ResolvedConfig]) -> None:
    if library.load() is None:
        pytest.skip("there is no compiler here")
    resolved = resolve()
    assert (resolved.ops, resolved.attention, resolved.starts_with_torch) == ("native", "native", False)


@pytest.mark.usefixtures("not_compiled")
def test_what_torch_cannot_do(
    resolve: Callable[..., ResolvedConfig], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    resolved = resolve(dtype="bfloat16")
    weights = ModelDirectory(resolved.model_dir).weights_bytes(torch.bfloat16)
    assert reason_to_wait(resolved, GIB, GIB + 2 * weights) is None
    assert reason_to_wait(resolved, GIB, None) is None
    reason = reason_to_wait(resolved, GIB, GIB + 2 * weights - 1)
    assert reason and "second copy of the weights does not fit" in reason
    reason = reason_to_wait(replace(resolved, draft=resolved), GIB, None)
    assert reason and "draft model" in reason

    def counted(self: object, dtype: object, bits: float | None = None, *, stays_quantized: bool = False) -> int:
        return weights // 4 if stays_quantized else weights

    monkeypatch.setattr(ModelDirectory, "weights_bytes", counted)
    reason = reason_to_wait(resolved, GIB, None)
    assert reason and "quantized form of the model's file" in reason
    # These are dequantized in any case.
    assert reason_to_wait(replace(resolved, dtype=torch.float32), GIB, None) is None
    assert reason_to_wait(replace(resolved, quantization="int8"), GIB, None) is None
    with caplog.at_level(logging.INFO, config.__name__):
        assert not resolve(dtype="bfloat16").starts_with_torch
    assert "waiting until the native kernels are compiled: only they multiply" in caplog.text
    monkeypatch.undo()
    monkeypatch.setattr(compiler, "can_write_cache", lambda: False)
    reason = reason_to_wait(resolved, GIB, None)
    assert reason and "cache folder" in reason
