"""Two replicas behind a load balancer are restarted one after the other under load, without losing a stream."""

from __future__ import annotations

import asyncio
import signal
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.e2e.balancer import CHECK_SECONDS, LAME_DUCK_SECONDS, Balancer
from tests.e2e.processes import (
    PATIENCE_SECONDS,
    Gateway,
    Running,
    Wire,
    chat,
    deployment,
    gateway,
    key,
    simple_policy,
    until,
)
from tests.ports import free_port

pytestmark = [pytest.mark.e2e, pytest.mark.slow(seconds=12)]

CLIENTS = 4


async def test_two_replicas_are_restarted_and_no_stream_is_lost(tmp_path: Path, local_engine: Running) -> None:
    policy = simple_policy(local_engine.url, deployments=[deployment("local", local_engine.url, max_concurrency=8)])
    storage, ports = f"sqlite:///{tmp_path / 'state.db'}", {"a": free_port(), "b": free_port()}

    def replica(name: str) -> AbstractContextManager[Gateway]:
        return gateway(
            tmp_path / name, policy, storage=storage, port=ports[name], replica=name, drain_seconds="60",
            lame_duck_seconds=LAME_DUCK_SECONDS, log_level="warning",
        )  # fmt: skip

    async def restart(name: str, running: AbstractContextManager[Gateway]) -> AbstractContextManager[Gateway]:
        before = balancer.connections[ports[name]]
        await asyncio.to_thread(running.__exit__, None, None, None)  # SIGTERM; it must exit with 0
        again = replica(name)
        await asyncio.to_thread(again.__enter__)
        while balancer.connections[ports[name]] <= before:  # until its successor has received connections
            await asyncio.sleep(CHECK_SECONDS)
        return again

    async def stream(client: httpx2.AsyncClient) -> str:
        body = chat(stream=True, max_tokens=40, ignore_eos=True)
        async with client.stream("POST", "/v1/chat/completions", json=body) as reply:
            assert reply.status_code == 200, await reply.aread()
            return (await reply.aread()).decode()

    async def streams(url: str, keep_alive: int) -> list[str]:
        headers, limits = {"authorization": f"Bearer {key('dev')}"}, httpx2.Limits(max_keepalive_connections=keep_alive)
        async with httpx2.AsyncClient(base_url=url, headers=headers, limits=limits, timeout=PATIENCE_SECONDS) as client:
            answers = []
            while not restarted.is_set():
                answers.append(await stream(client))
            return answers

    balancer, restarted = Balancer(list(ports.values())), asyncio.Event()
    replicas = {name: replica(name) for name in ports}
    fronts = [await asyncio.to_thread(each.__enter__) for each in replicas.values()]
    async with balancer.serving() as url:
        await balancer.until_ready(len(ports))
        clients = [
            asyncio.create_task(streams(url, n % 2)) for n in range(CLIENTS)
        ]  # every other client uses keep-alive
        for name, running in replicas.items():
            replicas[name] = await restart(name, running)
        restarted.set()
        answers = [answer for answers in await asyncio.gather(*clients) for answer in answers]
    for running in replicas.values():
        await asyncio.to_thread(running.__exit__, None, None, None)
    assert all(answer.endswith("data: [DONE]\n\n") for answer in answers)
    receipts = [receipt for front in fronts for receipt in front.receipts()]
    assert len(receipts) == len(answers)
    assert {(receipt["outcome"], receipt["output"]) for receipt in receipts} == {("complete", 40)}


def test_a_lame_duck_serves_requests_and_closes_their_connections(tmp_path: Path, local_engine: Running) -> None:
    settings: dict[str, Any] = {"lame_duck_seconds": "60", "drain_seconds": "60"}
    with gateway(tmp_path, simple_policy(local_engine.url), **settings) as front:
        front.process.send_signal(signal.SIGTERM)
        until(lambda: httpx2.get(f"{front.url}/ready").status_code == 503)
        assert httpx2.get(f"{front.url}/health").status_code == 200
        reply = front.post("chat/completions", chat(max_tokens=2))
        assert (reply.status_code, reply.headers["connection"]) == (200, "close")
        with Wire(front, "chat/completions", chat(stream=True, max_tokens=100, ignore_eos=True)) as stream:
            stream.read_until(b"data: ")
            front.process.send_signal(signal.SIGTERM)  # a second signal ends the lame-duck time
            assert b"data: [DONE]" in stream.read_to_end()
        assert front.process.wait(60) == 0
