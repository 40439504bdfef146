"""kill -9 of a gateway with fifty streams in flight: each call gets exactly one receipt, which agrees with the engine.

And no concurrency slot stays taken, and the budget equals the receipts, whenever the gateway was killed.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx2
import pytest

from gateway.core.money import atoms_to_nanos, text_to_atoms
from gateway.storage import open_storage
from gateway.storage.base import SpendCharge
from tests.e2e.processes import (
    PATIENCE_SECONDS,
    Gateway,
    Running,
    chat,
    gateway,
    key,
    simple_policy,
    tenant,
    until,
    warmpath,
)
from tests.ports import free_port
from tests.redis_server import RedisServer

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

STREAMS = 50
INPUT = ("input_uncached", "cache_read", "cache_write")


async def stream(
    client: httpx2.AsyncClient, front: Gateway, number: int, finished: dict[str, bool], some: asyncio.Event
) -> None:
    """Record by call id whether `[DONE]` has arrived. Sets `some` once a fifth of the streams have finished."""
    body = chat(f"Question {number}", stream=True, max_tokens=4 + 4 * (number % 10), ignore_eos=True)
    headers = {"authorization": f"Bearer {key('dev')}"}
    url = f"{front.url}/v1/chat/completions"
    try:
        async with client.stream("POST", url, json=body, headers=headers) as reply:
            assert reply.status_code == 200
            call_id = reply.headers["x-request-id"]
            finished[call_id] = False
            async for line in reply.aiter_lines():
                finished[call_id] |= line == "data: [DONE]"
                if sum(finished.values()) >= STREAMS // 5:
                    some.set()
    except httpx2.TransportError:
        pass  # the gateway was killed


async def fifty_streams_and_a_kill(front: Gateway) -> dict[str, bool]:
    finished: dict[str, bool] = {}
    some = asyncio.Event()
    async with httpx2.AsyncClient(timeout=PATIENCE_SECONDS, limits=httpx2.Limits(max_connections=STREAMS)) as client:
        streams = [asyncio.create_task(stream(client, front, number, finished, some)) for number in range(STREAMS)]
        await some.wait()
        front.process.kill()
        await asyncio.gather(*streams)
    front.process.wait()
    return finished


@pytest.mark.parametrize("storage", ["sqlite", "redis"])
def test_a_killed_gateway_recovers_its_open_calls(
    tmp_path: Path, local_engine: Running, redis_server: RedisServer, storage: str
) -> None:
    url = redis_server.url if storage == "redis" else f"sqlite:///{tmp_path / 'state.db'}"
    limits = {"concurrency": 10 * STREAMS, "tokens": "10M/1m", "budget": {"amount": 100, "per": "total"}}
    policy = simple_policy(local_engine.url, tenants=[tenant("dev", limits=limits)])
    port = free_port()
    until(lambda: local_engine.metric("vllm:num_requests_running") == 0)
    before = engines_count(local_engine)
    with gateway(tmp_path, policy, storage=url, port=port) as front:
        finished = asyncio.run(fifty_streams_and_a_kill(front))
    assert STREAMS // 5 <= sum(finished.values()) < STREAMS, "some streams had ended and some had not"

    with ExitStack() as stack:
        front = stack.enter_context(gateway(tmp_path, policy, storage=url, port=port))
        opened = {row["call_id"] for row in front.rows() if row["kind"] == "opened"}
        assert opened >= finished.keys(), "a request was sent for a call that was not opened"
        until(lambda: {receipt["call_id"] for receipt in front.receipts()} >= opened)
        rows = front.receipts()
        for call_id, done in finished.items():
            mine = [row for row in rows if row["call_id"] == call_id]
            assert len(mine) == 1
            assert not done or (mine[0]["outcome"], mine[0]["exact"]) == ("complete", True)
        assert sum(row["outcome"] == "gateway_lost" for row in rows) > 0
        billed = [sum(sum(row[name] for name in names) for row in rows) for names in (INPUT, ("output",))]
        assert billed == [now - then for now, then in zip(engines_count(local_engine), before, strict=True)]
        verified = warmpath("usage", "verify", "--json", cwd=tmp_path, data_dir=str(tmp_path / "data"))
        assert verified.returncode == 0, verified.stderr
        assert json.loads(verified.stdout)["rows"] >= 2 * len(rows)  # each call has an open row, too
        until(lambda: local_engine.metric("vllm:num_requests_running") == 0)
        # All slots are free again, though a lease (30 s) may have to end first.
        until(lambda: concurrent_calls(front) == [200] * STREAMS)
        assert front.receipts()[: len(rows)] == rows
        assert any(row.get("leased") for row in rows)
        until(lambda: spent_nanos(url) == sum(nanos(row) for row in front.receipts()), pause_seconds=0.2)
        # What was not reported before the kill is charged after the start, once.
        front.process.kill()
        front.process.wait()
    with gateway(tmp_path, policy, storage=url, port=port) as front:
        assert concurrent_calls(front) == [200] * STREAMS
        until(lambda: spent_nanos(url) == sum(nanos(row) for row in front.receipts()), pause_seconds=0.2)


def nanos(receipt: dict[str, Any]) -> int:
    return atoms_to_nanos(text_to_atoms(receipt["cost"]))


def spent_nanos(url: str) -> int:
    """What the storage has charged to the budget."""
    charge = SpendCharge("dev/budget/total", 0, 100 * 10**9, math.inf)

    async def left() -> int:
        storage = open_storage(url)
        await storage.open()
        try:
            return (await storage.remaining([charge], now=time.time()))[0]
        finally:
            await storage.close()

    return charge.limit - asyncio.run(left())


def engines_count(engine: Running) -> list[float]:
    return [engine.metric(f"vllm:{name}_tokens_total") for name in ("prompt", "generation")]


def concurrent_calls(front: Gateway) -> list[int]:
    async def all_at_once() -> list[int]:
        limits = httpx2.Limits(max_connections=STREAMS)
        headers = {"authorization": f"Bearer {key('dev')}"}
        async with httpx2.AsyncClient(timeout=PATIENCE_SECONDS, limits=limits, headers=headers) as client:
            url, body = f"{front.url}/v1/chat/completions", chat(max_tokens=40, ignore_eos=True)
            replies = await asyncio.gather(*(client.post(url, json=body) for _ in range(STREAMS)))
        return [reply.status_code for reply in replies]

    return asyncio.run(all_at_once())
