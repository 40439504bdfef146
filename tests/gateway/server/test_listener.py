"""The gateway as a process: how it starts, fails to start, and stops."""

from __future__ import annotations

import asyncio
import fcntl
import os
import socket
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import httpx2
import pytest
import yaml

from gateway.billing.ledger.chain import segments
from gateway.core.interpreter import this_is_unoptimised
from gateway.endpoints.wire import STALL_SECONDS
from gateway.server.listener import listen
from tests.gateway.harness import DONE, KEY, PEPPER, chat, delta, policy_of
from tests.gateway.providers.scripted_server import STREAM_END, STREAM_HEAD, ReceivedRequest, ScriptedServer, chunked

pytestmark = pytest.mark.slow

PATIENCE_SECONDS = 60.0
TOLD_WHILE_IT_STARTS = """
import os, signal, sys
def hook(event, args):
    if event == "import" and args[0] == "uvloop":  # uvicorn is about to make its loop, and handles no signal yet
        os.kill(os.getpid(), signal.{name})
sys.addaudithook(hook)
from gateway.__main__ import main
main()
"""


class Process:
    def __init__(self, process: asyncio.subprocess.Process, directory: Path) -> None:
        self._process = process
        self.ledger = directory / "ledger" / "r"
        self.url = ""

    async def until_ready(self) -> None:
        assert self._process.stdout is not None
        line = await asyncio.wait_for(self._process.stdout.readline(), PATIENCE_SECONDS)
        self.url = next(word for word in line.decode().split() if word.startswith("http"))

    async def until_over(self) -> tuple[int, str]:
        out, log = await asyncio.wait_for(self._process.communicate(), PATIENCE_SECONDS)
        assert self._process.returncode is not None
        return self._process.returncode, (out + log).decode()

    def terminate(self) -> None:
        self._process.terminate()

    def kill(self) -> None:
        if self._process.returncode is None:
            self._process.kill()


@asynccontextmanager
async def a_process(
    directory: Path, base_url: str, *, drain_seconds: int = 30, program: Sequence[str] = ("-m", "gateway")
) -> AsyncIterator[Process]:
    deployments = [{"name": "a", "base_url": base_url, "model": "served"}]
    policy = policy_of(deployments=deployments, models=[{"name": "m", "deployments": ["a"]}])
    (directory / "policy.yaml").write_text(yaml.safe_dump(policy))
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("WARMPATH_", "OTEL_"))}
    settings = {
        "WARMPATH_DATA_DIR": str(directory), "WARMPATH_REPLICA": "r", "WARMPATH_KEY_PEPPER": PEPPER,
        "WARMPATH_DRAIN_SECONDS": str(drain_seconds), "PYTHONPATH": str(Path(__file__).parents[3]),
    }  # fmt: skip
    process = Process(
        await asyncio.create_subprocess_exec(
            sys.executable, *program, "serve", "--policy", str(directory / "policy.yaml"), "--port", "0",
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, env=kept | settings,
        ),
        directory,
    )  # fmt: skip
    try:
        yield process
    finally:
        process.kill()
        await process.until_over()


@pytest.mark.parametrize("in_time", [True, False])
async def test_a_stream_under_way_is_finished_or_told_and_the_exit_is_clean(tmp_path: Path, in_time: bool) -> None:
    go_on = asyncio.Event()

    async def script(request: ReceivedRequest, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM_HEAD + chunked(delta("one")))
        await go_on.wait()
        writer.write(chunked(DONE) + STREAM_END)

    drain_seconds = 30 if in_time else 0
    async with (
        ScriptedServer(script) as server,
        a_process(tmp_path, server.base_url, drain_seconds=drain_seconds) as process,
        httpx2.AsyncClient(headers={"authorization": f"Bearer {KEY}"}, timeout=PATIENCE_SECONDS) as client,
    ):
        await process.until_ready()
        url = f"{process.url}/v1/chat/completions"
        async with client.stream("POST", url, content=chat(stream=True)) as answer:
            chunks = answer.aiter_bytes()
            assert await anext(chunks) == delta("one")
            process.terminate()
            if in_time:
                go_on.set()
            rest = b"".join([chunk async for chunk in chunks])
        code, log = await process.until_over()
        assert code == 0 and "Traceback" not in log and "CancelledError" not in log
        assert log.count("--enable-optimizations") == this_is_unoptimised()
        assert rest == DONE if in_time else b"shutting down" in rest and DONE not in rest
        rows = segments(process.ledger)[-1].read_bytes().splitlines()
        (receipt,) = (row for row in rows if b'"kind":"receipt"' in row)
        assert (b'"outcome":' not in receipt) == in_time  # a receipt omits the usual outcome


async def test_a_ledger_that_is_taken_ends_the_start_with_words(tmp_path: Path) -> None:
    (tmp_path / "ledger" / "r").mkdir(parents=True)
    with (tmp_path / "ledger" / "r" / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        async with a_process(tmp_path, "http://127.0.0.1:9/v1") as process:
            code, log = await process.until_over()
    assert code == 1 and "is being written by process" in log
    assert "Traceback" not in log


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
async def test_told_to_stop_while_it_starts_it_stops(tmp_path: Path, name: str) -> None:
    program = ("-c", TOLD_WHILE_IT_STARTS.format(name=name))
    async with a_process(tmp_path, "http://127.0.0.1:9/v1", program=program) as process:
        code, log = await process.until_over()
    assert code == 0 and "Traceback" not in log
    assert segments(process.ledger), "it was on its way, and not ended by the signal itself"


def test_an_address_that_is_taken_is_named() -> None:
    with listen("127.0.0.1", 0) as first:
        first.listen()
        port = first.getsockname()[1]
        with pytest.raises(OSError, match=f"cannot listen on 127.0.0.1:{port}"):
            listen("127.0.0.1", port)


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="this system has no TCP_USER_TIMEOUT")
def test_the_kernel_drops_a_client_that_takes_nothing() -> None:
    with listen("127.0.0.1", 0) as listener:
        listener.listen()
        with socket.create_connection(listener.getsockname()), listener.accept()[0] as accepted:
            timeout_ms = accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
    assert timeout_ms == STALL_SECONDS * 1000
