"""If the event loop does not run for a while, no time limit of a client, a deployment or the queue expires for it.

Each test stalls the loop for longer than the limit. What the other side sends meanwhile, or right after it, counts.
"""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import AsyncIterator

import pytest
import uvloop

from gateway.deployments.fleet import Fleet
from gateway.deployments.slot_permit import SlotPermit
from gateway.policy.traffic import Floor
from gateway.providers import make_provider, openai
from gateway.providers.base import UpstreamResponse
from gateway.providers.offline import OfflineProvider
from gateway.providers.transport import HTTPTransport
from gateway.queueing import Queue
from gateway.routing.attempt_runner import _read_until_output
from gateway.server import http_protocol
from gateway.settings import resolve_secret
from tests.gateway.calls import a_call, a_policy
from tests.gateway.providers.scripted_server import ReceivedRequest, ScriptedServer, json_response
from tests.gateway.server.sockets import body, head, replying, serving

STALL_SECONDS = 0.8
LIMIT_SECONDS = 0.5


def stall() -> None:
    time.sleep(STALL_SECONDS)


def test_a_head_whose_rest_arrives_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the event loop of the gateway, which runs its timers before it reads."""
    monkeypatch.setattr(http_protocol, "HEAD_SECONDS", LIMIT_SECONDS)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_send_in_two_parts())


async def _send_in_two_parts() -> None:
    async with serving(replying(head(200, (b"content-length", b"2")), body(b"ok"))) as port:
        client = socket.create_connection(("127.0.0.1", port))
        await asyncio.to_thread(client.sendall, b"GET / HTTP/1.1\r\n")
        await asyncio.sleep(0.05)  # the beginning has been read
        rest = threading.Timer(STALL_SECONDS / 2, client.sendall, (b"host: x\r\nconnection: close\r\n\r\n",))
        rest.start()
        await _stall_in_a_callback_that_reads()
        await asyncio.to_thread(rest.join)
        received = b"".join([part async for part in _parts(client)])
        client.close()
        assert received.startswith(b"HTTP/1.1 200")


async def _stall_in_a_callback_that_reads() -> None:
    """Timers that are due then run before the loop reads again."""
    loop, stalled = asyncio.get_running_loop(), asyncio.Event()
    reader, writer = socket.socketpair()

    def read() -> None:
        loop.remove_reader(reader)
        stall()
        stalled.set()

    loop.add_reader(reader, read)
    writer.send(b"x")
    await stalled.wait()
    reader.close()
    writer.close()


async def _parts(client: socket.socket) -> AsyncIterator[bytes]:
    while part := await asyncio.to_thread(client.recv, 65536):
        yield part


async def test_a_slot_that_becomes_free_meanwhile() -> None:
    deployment = {"name": "a", "base_url": "http://a.invalid/v1", "model": "served", "max_concurrency": 1}
    policy = a_policy(
        deployments=[deployment],
        models=[{"name": "m", "deployments": ["a"]}],
        classes={"realtime": {"max_wait": "500ms"}, "batch": {}},
    )
    fleet = Fleet(lambda _: OfflineProvider())
    fleet.apply(policy)
    queue = Queue(fleet)

    async def slot() -> SlotPermit:
        return await queue.acquire_slot(a_call(policy=policy, now=asyncio.get_running_loop().time()))

    with await slot():
        waiting = asyncio.create_task(slot())
        await asyncio.sleep(0.05)
        stall()
        await asyncio.sleep(0.05)
    with await waiting:
        pass


async def test_a_health_check_whose_answer_arrives_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openai, "HEALTH_TIMEOUT_SECONDS", LIMIT_SECONDS)

    async def answer(received: ReceivedRequest, writer: asyncio.StreamWriter) -> None:
        writer.write(json_response(b'{"data": []}'))
        stall()

    async with ScriptedServer(answer) as server:
        deployment = {"name": "a", "base_url": f"{server.base_url}", "model": "served", "provider": "openai"}
        policy = a_policy(deployments=[deployment], models=[{"name": "m", "deployments": ["a"]}])
        provider = make_provider(policy.deployments[0], HTTPTransport(), resolve_secret)
        assert await provider.healthy()


async def test_an_answer_that_keeps_the_floor() -> None:
    class Response(UpstreamResponse):
        async def __anext__(self) -> bytes:
            stall()
            await asyncio.sleep(0)
            return event

        async def aclose(self) -> None:
            pass

    event = b"data: " + json.dumps({"choices": [{"index": 0, "delta": {"content": "a"}}]}).encode() + b"\n\n"
    floor = Floor(chunks=3, within=LIMIT_SECONDS)
    assert await _read_until_output(event, Response(), floor) == 3 * event
