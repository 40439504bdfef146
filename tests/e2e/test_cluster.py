"""Three gateways on one Redis, in front of discovered engines: engines come, leave and crash, and gateways roll.

No request is lost, each has one receipt, and the engines counted what the receipts and unbilled rows say.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any

import httpx2
import pytest
import yaml

from gateway.billing.ledger.collector import collect
from tests.e2e.balancer import CHECK_SECONDS, LAME_DUCK_SECONDS, Balancer
from tests.e2e.processes import (
    DEMO,
    PATIENCE_SECONDS,
    PRICE,
    Gateway,
    Running,
    chat,
    engine,
    gateway,
    key,
    tenant,
    until,
)
from tests.ports import free_port
from tests.redis_server import RedisServer, own_redis_server

__all__ = ["own_redis_server"]
pytestmark = [pytest.mark.e2e, pytest.mark.slow(seconds=25)]

CLIENTS = 4
OUTPUT_TOKENS = 40  # the demo model rarely ends before them; with ignore_eos a cut stream could not be resumed
Row = dict[str, Any]


class Engines:
    """The engines, and the file from which the gateways discover them."""

    def __init__(self, folder: Path, started: ExitStack) -> None:
        self.file = folder / "engines.yaml"
        self._folder = folder
        self._started = started
        self.running: dict[str, Running] = {}

    async def start(self, *names: str) -> None:
        """Start engines side by side. The gateways do not know them yet."""

        def start(name: str) -> None:
            self.running[name] = self._started.enter_context(engine(self._folder / name))

        await asyncio.gather(*(asyncio.to_thread(start, name) for name in names))

    def list(self, *names: str) -> None:
        """Replace the list atomically, as a tool that writes such files does."""
        targets = [
            {"targets": [self.running[name].url.removeprefix("http://")], "labels": {"name": name, "model": DEMO}}
            for name in names
        ]
        new = self.file.with_suffix(".new")
        new.write_text(yaml.safe_dump(targets))
        new.rename(self.file)

    def counted(self, name: str) -> tuple[int, int]:
        """The prompt and output tokens that an engine has counted."""
        prompt, output = (self.running[name].metric(f"vllm:{kind}_tokens_total") for kind in ("prompt", "generation"))
        return int(prompt), int(output)


class Clients:
    """Clients that stream chats through the load balancer, one after the other, until they are stopped."""

    def __init__(self, url: str) -> None:
        self._stopped = asyncio.Event()
        self.answers: list[tuple[str, str, str]] = []  # call id, deployment, text
        self._tasks = [asyncio.create_task(self._run(url, number)) for number in range(CLIENTS)]

    async def _run(self, url: str, number: int) -> None:
        headers = {"authorization": f"Bearer {key('dev')}"}
        limits = httpx2.Limits(max_keepalive_connections=number % 2)  # the others open a connection for each request
        async with httpx2.AsyncClient(base_url=url, headers=headers, limits=limits, timeout=PATIENCE_SECONDS) as client:
            turn = 0
            while not self._stopped.is_set():
                turn += 1
                await self._stream(client, f"client {number}, turn {turn}: hello")

    async def _stream(self, client: httpx2.AsyncClient, text: str) -> None:
        body = chat(text, stream=True, max_tokens=OUTPUT_TOKENS, temperature=0)
        async with client.stream("POST", "/v1/chat/completions", json=body) as reply:
            answer = (await reply.aread()).decode()
            assert reply.status_code == 200, answer
            names = reply.headers["x-request-id"], reply.headers["x-warmpath-deployment"]
            self.answers.append((*names, answer))

    async def until_served_by(self, deployment: str) -> None:
        seen = len(self.answers)
        await self._until(lambda: any(name == deployment for _, name, _ in self.answers[seen:]))

    async def until_more(self, count: int) -> None:
        wanted = len(self.answers) + count
        await self._until(lambda: len(self.answers) >= wanted)

    async def _until(self, condition: Any) -> None:
        async with asyncio.timeout(PATIENCE_SECONDS):
            while not condition():
                for task in self._tasks:
                    if task.done():
                        task.result()  # raises why it ended
                await asyncio.sleep(0.02)

    async def stop(self) -> None:
        self._stopped.set()
        await asyncio.gather(*self._tasks)


def policy_of(file: Path) -> Mapping[str, Any]:
    return {
        "deployments": [
            {"name": "engines", "provider": "warmpath", "source": {"file": str(file)}, "model": DEMO, "price": PRICE,
             "max_concurrency": 8}
        ],
        "models": [{"name": DEMO, "deployments": ["engines"], "continue_cut_streams": True}],
        "tenants": [tenant("dev", limits={"concurrency": 64, "budget": {"amount": 100, "per": "month"}})],
    }  # fmt: skip


async def test_engines_come_and_go_and_gateways_roll_and_no_request_is_lost_or_billed_twice(
    tmp_path: Path, own_redis_server: RedisServer
) -> None:
    ports = {name: free_port() for name in ("a", "b", "c")}
    with ExitStack() as started:
        engines = Engines(tmp_path, started)
        await engines.start("one", "two", "three")
        engines.list("one", "two")

        def replica(name: str) -> AbstractContextManager[Gateway]:
            return gateway(
                tmp_path / name, policy_of(engines.file), storage=own_redis_server.url, port=ports[name], replica=name,
                ledger_ship=own_redis_server.url, drain_seconds="60", lame_duck_seconds=LAME_DUCK_SECONDS,
                log_level="warning",
            )  # fmt: skip

        replicas = {name: replica(name) for name in ports}
        fronts = await asyncio.gather(*(asyncio.to_thread(each.__enter__) for each in replicas.values()))
        balancer = Balancer(list(ports.values()))
        async with balancer.serving() as url:
            await balancer.until_ready(len(ports))
            clients = Clients(url)
            await clients.until_served_by("engines/two")

            engines.list("one", "two", "three")
            await clients.until_served_by("engines/three")

            for name, running in replicas.items():
                before = balancer.connections[ports[name]]
                await asyncio.to_thread(running.__exit__, None, None, None)  # SIGTERM; it must exit with 0
                replicas[name] = replica(name)
                await asyncio.to_thread(replicas[name].__enter__)
                while balancer.connections[ports[name]] <= before:
                    await asyncio.sleep(CHECK_SECONDS)

            engines.list("two", "three")  # `one` is removed from the list, finishes its calls, and ends
            for front in fronts:
                await asyncio.to_thread(until, lambda front=front: has_left(front, "engines/one"))
            await clients.until_more(2 * CLIENTS)
            one = await asyncio.to_thread(engines.counted, "one")
            assert await asyncio.to_thread(engines.running["one"].stop) == 0

            await clients.until_served_by("engines/two")
            engines.running["two"].kill()
            engines.list("three")
            await clients.until_more(2 * CLIENTS)
            await clients.stop()
        three = await asyncio.to_thread(engines.counted, "three")
        for running in replicas.values():
            await asyncio.to_thread(running.__exit__, None, None, None)

    assert [text for _, _, text in clients.answers if not text.endswith("data: [DONE]\n\n")] == []
    receipts = [receipt for front in fronts for receipt in front.receipts()]
    assert Counter(row["call_id"] for row in receipts) == Counter(call_id for call_id, _, _ in clients.answers)
    assert {row["outcome"] for row in receipts} == {"complete"}
    rows = [row for front in fronts for row in front.rows()]
    assert billed(rows, "engines/one") == one
    cut = [row for row in receipts if len(row["attempts"]) > 1]  # of which the killed engine made a part
    counted = billed([row for row in rows if row not in cut], "engines/three")
    assert counted[0] <= three[0] and counted[1] <= three[1] <= counted[1] + OUTPUT_TOKENS * len(cut)
    assert all(0 < row["output"] <= OUTPUT_TOKENS for row in receipts)

    collect(own_redis_server.url, tmp_path / "collected")
    shipped = Gateway(fronts[0].process, "", fronts[0].log, tmp_path / "collected").receipts()
    assert sorted(row["event_id"] for row in shipped) == sorted(row["event_id"] for row in receipts)


def has_left(front: Running, deployment: str) -> bool:
    """Whether a gateway no longer uses a deployment, and has no calls in flight there."""
    state = httpx2.get(f"{front.url}/ready", timeout=PATIENCE_SECONDS).json()
    return deployment not in state["deployments"] and deployment not in state["draining"]


def billed(rows: list[Row], deployment: str) -> tuple[int, int]:
    """The prompt and output tokens of a deployment's work in the ledger."""
    work = [row for row in rows if row["kind"] in ("receipt", "unbilled") and row["deployment"] == deployment]
    prompt = sum(row["input_uncached"] + row["cache_read"] + row["cache_write"] for row in work)
    return prompt, sum(row["output"] for row in work)
