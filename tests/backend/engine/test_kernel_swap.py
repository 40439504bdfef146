"""Torch is replaced by the kernels between two steps, and no request notices."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from backend.engine import async_engine, thread_tuner
from backend.engine.async_engine import AsyncEngine
from backend.engine.config import EngineConfig
from backend.engine.engine import Engine
from backend.engine.kernel_swap import KernelSwap
from backend.engine.resolved_config import ResolvedConfig
from backend.engine.threads import ThreadChoice
from backend.native import compiler, library
from backend.native.background import BackgroundCompilation
from backend.native.compiler import BuildError
from backend.ops.native import NativeOps
from backend.ops.reference import ReferenceOps
from tests.backend.engine.scripted_runner import WAIT_SECONDS, make_request, read, tokens
from tests.backend.engine.test_invariance import make_requests, run

if library.load() is None:
    pytest.skip("there is no compiler here", allow_module_level=True)


class HeldCompilation(BackgroundCompilation):
    """Ends when a test says so."""

    def __init__(self, error: str | None = None) -> None:
        self.finished = threading.Event()
        self.stopped = False
        self._error = error

    def wait(self) -> None:
        assert self.finished.wait(WAIT_SECONDS)
        if self.stopped or self._error:
            raise BuildError(self._error or "stopped")

    def stop(self) -> None:
        self.stopped = True
        self.finished.set()


Load = Callable[..., Engine]


@pytest.fixture
def load(checkpoint_dir: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> Load:
    """An engine that starts with torch."""
    monkeypatch.setattr(compiler, "is_compiled", lambda: False)

    def load(name: str = "llama", **options: Any) -> Engine:
        given: dict[str, Any] = {"num_blocks": 64, "block_size": 4, "num_threads": 1, "wait_for_kernels": False}
        engine = Engine.load(EngineConfig(model_dir=checkpoint_dir(name), device="cpu", **given | options))
        assert engine.config.starts_with_torch
        assert type(engine.runner.model.ops) is ReferenceOps
        return engine

    return load


def swap_now(engine: Engine) -> None:
    """What `KernelSwap` does on its thread and on the engine's."""
    compilation = HeldCompilation()
    compilation.finished.set()
    swap = KernelSwap(engine, lambda work: work(), lambda: compilation)
    swap.start()
    swap._thread.join()


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("llama", {}),
        ("llama", {"kv_cache_dtype": "int8"}),
        ("llama", {"kv_cache_dtype": "fp8_e4m3"}),
        ("llama", {"quantization": "int8"}),
        ("llama", {"quantization": "int4"}),
        ("mistral-sliding", {}),
        ("mixtral", {}),
        ("llama", {"speculation": "ngram"}),
        ("llama", {"enforce_eager": True}),
    ],
    ids=str,
)
def test_running_requests_continue(load: Load, name: str, options: dict[str, Any]) -> None:
    """In the middle of prompts and of outputs, with the keys and values that torch has written."""
    expected = run(load(name, **options), make_requests())
    for num_steps in (1, 9):
        engine = load(name, max_num_batched_tokens=64, **options)
        requests = make_requests()
        for request in requests:
            engine.add(request)
        for _ in range(num_steps):
            engine.step()
        is_prompt = [request.num_uncomputed_tokens > 1 for request in requests]
        assert any(is_prompt) == (num_steps == 1)
        swap_now(engine)
        assert isinstance(engine.runner.model.ops, NativeOps)
        assert not engine.config.starts_with_torch
        assert run(engine, []) == []
        assert [request.token_ids[request.num_prompt_tokens :] for request in requests] == expected
        # The prefix cache still has what torch has computed.
        again = make_requests()
        cached = engine.stats().prefix_cache_hits_total
        assert run(engine, again) == expected
        assert engine.stats().prefix_cache_hits_total > cached


async def test_the_engine_streams_before_through_and_after_the_change(
    load: Load, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """While it is idle, too: nothing waits for the next request."""
    compilation = HeldCompilation()
    loaded = load()
    swapped = asyncio.Event()
    loop = asyncio.get_running_loop()
    use_kernels = loaded.use_kernels

    def observed(config: ResolvedConfig, model: Any) -> None:
        assert threading.current_thread().name == "engine"
        use_kernels(config, model)
        loop.call_soon_threadsafe(swapped.set)

    monkeypatch.setattr(loaded, "use_kernels", observed)
    monkeypatch.setattr(async_engine, "KernelSwap", lambda engine, run: KernelSwap(engine, run, lambda: compilation))
    engine = AsyncEngine(loaded)
    with caplog.at_level(logging.INFO):
        await engine.start()
        try:
            before = tokens(await read(engine.submit(make_request("before", max_tokens=20, temperature=0.0))))
            assert not swapped.is_set()
            compilation.finished.set()
            await asyncio.wait_for(swapped.wait(), WAIT_SECONDS)
            after = tokens(await read(engine.submit(make_request("after", max_tokens=20, temperature=0.0))))
        finally:
            await engine.stop()
    assert before == after
    ours = [message for message in caplog.messages if "kernels" in message]
    assert ours == [
        "torch computes until the native kernels are compiled",
        "loading the weights for the native kernels",
        "the native kernels are in use",
    ]


async def test_if_the_compilation_fails_torch_continues(
    load: Load, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    compilation = HeldCompilation(error="out of registers")
    compilation.finished.set()
    monkeypatch.setattr(async_engine, "KernelSwap", lambda engine, run: KernelSwap(engine, run, lambda: compilation))
    engine = AsyncEngine(load())
    await engine.start()
    assert engine._kernel_swap
    await asyncio.to_thread(engine._kernel_swap._thread.join)
    assert len(tokens(await read(engine.submit(make_request())))) == 5
    assert engine.engine.config.starts_with_torch
    await engine.stop()
    (warning,) = (record for record in caplog.records if record.levelno == logging.WARNING)
    assert "torch continues to compute, several times slower: out of registers" in warning.getMessage()


async def test_an_engine_that_stops_ends_the_compilation(
    load: Load, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    compilation = HeldCompilation()
    monkeypatch.setattr(async_engine, "KernelSwap", lambda engine, run: KernelSwap(engine, run, lambda: compilation))
    engine = AsyncEngine(load())
    await engine.start()
    await engine.stop()
    await engine.stop()
    assert compilation.stopped
    assert not [record for record in caplog.records if record.levelno == logging.WARNING]
    never_started = AsyncEngine(load())
    await never_started.stop()


def test_the_number_of_threads_is_chosen_for_the_kernels(
    load: Load, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = load(num_threads=None)
    before = engine.config.num_threads
    chosen = before + 1
    monkeypatch.setattr(thread_tuner, "choose_again", lambda native, cores, current: ThreadChoice(chosen, "measured"))
    with caplog.at_level(logging.INFO, thread_tuner.__name__):
        swap_now(engine)
    ops = engine.runner.model.ops
    assert isinstance(ops, NativeOps)
    assert ops.call.num_threads == chosen
    assert f"{chosen} instead of {before}, because the native kernels compute" in caplog.text
    engine._use_threads(1)
