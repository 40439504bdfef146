"""A process that ends or hangs ends the engine with an error that names it, and no process outlives the engine."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx2
import pytest
from safetensors.torch import load_file, save_file

from backend.engine.async_engine import AsyncEngine
from backend.engine.engine import Engine
from backend.engine.errors import RankFailed, WeightsError
from backend.engine.outputs import FinishReason, StepOutput
from backend.engine.request import Request
from backend.engine.sampling_params import SamplingParams
from backend.parallel import group, processes
from tests.backend.checkpoints import build_model, save
from tests.backend.parallel.conftest import LoadEngine
from tests.backend.server.conftest import StartServer, checkpoint, start_server
from tests.e2e.processes import clean_environment, running
from tests.launcher import PYTHON

__all__ = ["checkpoint", "start_server"]

SECONDS = 20.0  # until an end is noticed, at most


def followers(pid: int) -> list[int]:
    """The processes that a process has started and that still run."""
    found = [child for tasks in Path(f"/proc/{pid}/task").glob("*/children") for child in tasks.read_text().split()]
    return [int(child) for child in found if "backend.parallel.follower" in command_of(int(child))]


def command_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < end, "not within the bound"
        time.sleep(0.05)


@pytest.fixture
def divided(load: LoadEngine, checkpoint_dir: Callable[[str], Path]) -> Iterator[tuple[Engine, int]]:
    """An engine with two ranks, and the process of the second one."""
    engine = load(checkpoint_dir("llama"), tensor_parallel_size=2)
    (pid,) = followers(os.getpid())
    yield engine, pid
    engine.runner.model.close()
    assert not followers(os.getpid())


def endless() -> Request:
    return Request("r", [5, 6, 7], SamplingParams(max_tokens=400, temperature=0.0))


async def test_open_streams_end_when_a_rank_is_killed(divided: tuple[Engine, int]) -> None:
    loaded, pid = divided
    engine = AsyncEngine(loaded)
    await engine.start()
    stream = engine.submit(endless())
    outputs: list[StepOutput] = [await anext(stream)]
    os.kill(pid, signal.SIGKILL)
    async with asyncio.timeout(SECONDS):
        outputs += [output async for output in stream]
    assert outputs[-1].finish_reason is FinishReason.ERROR
    assert f"rank 1 of 2 (process {pid}) was ended by SIGKILL" in (outputs[-1].error or "")
    assert not engine.healthy
    await engine.stop()


@pytest.mark.slow
def test_the_error_names_the_rank_that_ended_first(load: LoadEngine, checkpoint_dir: Callable[[str], Path]) -> None:
    """The other ranks notice that it is missing, too, but that is not the cause."""
    engine = load(checkpoint_dir("llama"), tensor_parallel_size=4)
    pids = sorted(followers(os.getpid()))  # in the order of their starts
    engine.add(endless())
    engine.step()
    os.kill(pids[-1], signal.SIGKILL)
    with pytest.raises(RankFailed, match=rf"rank 3 of 4 \(process {pids[-1]}\) was ended by SIGKILL"):
        for _ in range(400):
            engine.step()
    wait_until(lambda: not followers(os.getpid()))


async def test_an_idle_engine_notices_it_too(divided: tuple[Engine, int]) -> None:
    loaded, pid = divided
    engine = AsyncEngine(loaded)
    await engine.start()
    os.kill(pid, signal.SIGKILL)
    await asyncio.to_thread(wait_until, lambda: not engine.healthy)
    assert engine.error == f"rank 1 of 2 (process {pid}) was ended by SIGKILL"
    await engine.stop()
    assert engine.error


@pytest.mark.slow
def test_a_rank_that_hangs_fails_the_step(
    load: LoadEngine, checkpoint_dir: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group, "COLLECTIVE_SECONDS", 8.0)  # of rank 0; the other one keeps its own bound
    monkeypatch.setattr(processes, "EXPLAIN_SECONDS", 1.0)
    engine = load(checkpoint_dir("llama"), tensor_parallel_size=2)
    (pid,) = followers(os.getpid())
    engine.add(endless())
    engine.step()
    os.kill(pid, signal.SIGSTOP)
    with pytest.raises(RankFailed, match=r"the 2 ranks cannot reach each other: .* Timed out"):
        engine.step()
    wait_until(lambda: not followers(os.getpid()))
    with pytest.raises(RankFailed, match="the 2 ranks cannot reach each other"):
        engine.step()


def test_a_rank_that_cannot_start(
    load: LoadEngine, checkpoint_dir: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(RankFailed, match=r"rank 1 of 2 \(process \d+\) has ended with status 1"):
        load(checkpoint_dir("llama"), tensor_parallel_size=2)


def test_no_process_remains_if_rank_0_cannot_load(load: LoadEngine, tmp_path: Path) -> None:
    model = build_model("llama")
    save(model, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(WeightsError, match=r"up_proj\.weight is missing"):
        load(tmp_path, tensor_parallel_size=2)
    wait_until(lambda: not followers(os.getpid()))


@pytest.mark.slow
@pytest.mark.e2e
def test_a_server_with_two_ranks(start_server: StartServer) -> None:
    """It answers as one with a single process, reports a dead rank, and ends without a trace."""
    body = {"prompt": "The quick brown fox", "max_tokens": 32, "temperature": 0, "seed": 1}
    with start_server() as server:
        expected = httpx2.post(f"{server.base_url}/completions", json=body | {"model": server.model}).json()
    with start_server("--tensor-parallel-size", "2") as server:
        (pid,) = followers(server.process.pid)
        answer = httpx2.post(f"{server.base_url}/completions", json=body | {"model": server.model}).json()
        assert answer["choices"] == expected["choices"]
        assert answer["usage"] == expected["usage"]
        assert httpx2.get(f"{server.url}/health").status_code == 200
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: httpx2.get(f"{server.url}/health").status_code == 503)
        reply = httpx2.post(f"{server.base_url}/completions", json=body | {"model": server.model})
        assert reply.status_code >= 500
        assert "was ended by SIGKILL" in reply.text
    with start_server("--tensor-parallel-size", "2") as server:
        (pid,) = followers(server.process.pid)
    wait_until(lambda: not command_of(pid))


@pytest.mark.slow
@pytest.mark.e2e
def test_ranks_end_when_the_server_is_killed(checkpoint: Path, tmp_path: Path) -> None:
    command = [*PYTHON, "backend", "--model", str(checkpoint), "--port", "0", "--dtype", "float32"]
    command += ["--num-threads", "1", "--num-blocks", "64", "--wait-for-kernels", "--tensor-parallel-size", "2"]
    ready = r"^engine ready on (http://127\.0\.0\.1:\d+) model \S+\n$"
    with running(command, tmp_path, ready, clean_environment()) as started:
        pids = followers(started.process.pid)
        assert len(pids) == 1
        started.process.kill()
        wait_until(lambda: not any(map(command_of, pids)))
