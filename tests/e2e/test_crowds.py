"""Many clients, idle, slow, large or all at once: the gateway's memory stays bounded, and other clients are unaffected.

Runs in seconds. `benchmarks/crowds.py` has the full scale.
"""

from __future__ import annotations

import asyncio
import json
import re
import resource
import socket
import sys
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.e2e.processes import (
    DEMO,
    PATIENCE_SECONDS,
    Gateway,
    Running,
    chat,
    clean_environment,
    deployment,
    gateway,
    key,
    running,
    simple_policy,
    until,
)

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

IDLE, SLOW_HEADS, SLOW_BODIES, SLOW_READERS, STREAMS = 1500, 100, 50, 20, 300
MEBIBYTE = 2**20
GROWTH_MAX_BYTES = 64 * MEBIBYTE


@pytest.fixture(scope="module")
def upstream(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A server that streams at the pace that `user` requests, regardless of how fast the client reads."""
    command = [sys.executable, "-m", "benchmarks.gateway.mock_server"]
    with running(command, tmp_path_factory.mktemp("mock"), r"listening on (\d+)", clean_environment()) as started:
        yield Running(started.process, f"http://127.0.0.1:{started.url}", started.log)
        started.kill()  # it does not handle SIGTERM


@pytest.fixture
def front(tmp_path: Path, upstream: Running) -> Iterator[Gateway]:
    policy = simple_policy(
        upstream.url, deployments=[deployment("local", upstream.url, provider="openai", max_concurrency=1000)]
    )
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        with gateway(tmp_path, policy, max_body_bytes="2MiB", max_bodies_bytes="8MiB") as started:
            yield started
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def resident_bytes(front: Gateway) -> int:
    status = Path(f"/proc/{front.process.pid}/status").read_text()
    return int(re.findall(r"VmRSS:\s*(\d+)", status)[0]) * 1024


def request(body: Mapping[str, Any], *, length: int | None = None) -> bytes:
    """One call. `length` overrides its content-length."""
    content = json.dumps(body).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {key('dev')}\r\n"
    return f"{head}content-length: {length or len(content)}\r\n\r\n".encode() + content


def paced(tokens: int, *, per_second: int | None = None, prompt: str = "Hi") -> bytes:
    pace = f"paced-{per_second}" if per_second else "unpaced"
    return request(chat(prompt, stream=True, max_tokens=tokens, user=pace))


@asynccontextmanager
async def connected(front: Gateway, sends: bytes = b"") -> AsyncIterator[asyncio.StreamReader]:
    address = urlsplit(front.url)
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    try:
        writer.write(sends)
        await writer.drain()
        yield reader
    finally:
        writer.close()


async def answer(front: Gateway, sends: bytes) -> bytes:
    async with asyncio.timeout(PATIENCE_SECONDS), connected(front, sends) as reader:
        received = bytearray()
        while not received.endswith((b"\r\n0\r\n\r\n", b"}")):
            part = await reader.read(65536)
            assert part, bytes(received)
            received += part
        return bytes(received)


@asynccontextmanager
async def never_reading(front: Gateway, sends: bytes) -> AsyncIterator[None]:
    """A client that sends a request and never reads the answer."""
    address = urlsplit(front.url)
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect((address.hostname, address.port))
        client.sendall(sends)
        yield


async def test_idle_and_slow_clients_use_little_memory_and_block_no_other_client(front: Gateway) -> None:
    assert b"[DONE]" in await answer(front, paced(8))
    before = resident_bytes(front)
    async with AsyncExitStack() as crowd:
        for _ in range(IDLE):
            await crowd.enter_async_context(connected(front))
        for _ in range(SLOW_HEADS):
            await crowd.enter_async_context(connected(front, b"POST /v1/chat/completions HTTP/1.1\r\nhost"))
        for _ in range(SLOW_BODIES):  # together they announce far more than the common bound of bodies
            await crowd.enter_async_context(connected(front, request(chat(), length=MEBIBYTE)))
        for _ in range(SLOW_READERS):  # each is sent 6 MB
            await crowd.enter_async_context(never_reading(front, paced(30_000)))
        await asyncio.to_thread(
            until, lambda: front.metric("warmpath_deployment_inflight", deployment="local") == SLOW_READERS
        )
        answers = await asyncio.gather(*[answer(front, paced(20, per_second=100)) for _ in range(20)])
        assert all(b"HTTP/1.1 200" in each and b"[DONE]" in each for each in answers)
        assert resident_bytes(front) - before < GROWTH_MAX_BYTES
    # The slow readers have disconnected, and their upstream requests have ended.
    await asyncio.to_thread(until, lambda: front.metric("warmpath_inflight") == 0)
    await asyncio.to_thread(until, lambda: front.metric("warmpath_bodies_bytes") == 0)


async def test_many_concurrent_streams_are_complete(front: Gateway) -> None:
    before = resident_bytes(front)
    answers = await asyncio.gather(*[answer(front, paced(20, per_second=10)) for _ in range(STREAMS)])
    assert all(each.count(b'" token"') == 20 and b"[DONE]" in each for each in answers)
    assert resident_bytes(front) - before < GROWTH_MAX_BYTES
    await asyncio.to_thread(until, lambda: len(front.receipts(outcome="complete", model_asked=DEMO)) == STREAMS)


async def test_large_prompts_share_a_memory_bound(front: Gateway) -> None:
    large = "word " * (MEBIBYTE // 5)
    before = resident_bytes(front)
    async with AsyncExitStack() as crowd:
        for _ in range(7):
            reader = await crowd.enter_async_context(connected(front, paced(1000, per_second=1, prompt=large)))
            assert b" 200 " in await reader.readline()
        assert 7 * MEBIBYTE <= front.metric("warmpath_bodies_bytes") <= 8 * MEBIBYTE
        refused = await answer(front, paced(1, prompt=large))
        assert refused.startswith(b"HTTP/1.1 503") and b'"overloaded"' in refused
        assert b"retry-after: 1\r\n" in refused and b"x-should-retry: true\r\n" in refused
        assert b"[DONE]" in await answer(front, paced(4))  # a small prompt still fits
        too_large = await answer(front, paced(1, prompt=3 * large))
        assert too_large.startswith(b"HTTP/1.1 413")
        assert resident_bytes(front) - before < GROWTH_MAX_BYTES
    await asyncio.to_thread(until, lambda: front.metric("warmpath_bodies_bytes") == 0)
    assert b"[DONE]" in await answer(front, paced(1, prompt=large))
