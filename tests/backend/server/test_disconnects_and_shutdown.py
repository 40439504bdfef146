"""Responses that end early: the client disconnects, the server shuts down, the queue is full."""

from __future__ import annotations

import asyncio
import json
import signal
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import httpx2
import openai
import pytest

if TYPE_CHECKING:
    from tests.backend.server.conftest import RunningServer, StartServer

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

PATIENCE_SECONDS = 30
ENDLESS: dict[str, Any] = {"max_tokens": 8000, "ignore_eos": True, "prompt": "The quick brown fox"}


async def until(condition: Callable[[], bool]) -> None:
    """Polls a condition, with a timeout far beyond the expected time."""
    end = time.monotonic() + PATIENCE_SECONDS
    while not await asyncio.to_thread(condition):
        assert time.monotonic() < end, "timed out"
        await asyncio.sleep(0.01)


class RawClient:
    """An HTTP client on a plain socket, which can disconnect at any time."""

    def __init__(self, server: RunningServer, path: str, body: dict[str, Any]) -> None:
        self._address = urlsplit(server.url)
        content = json.dumps({"model": server.model} | body).encode()
        self._request = b"POST %s HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%s" % (
            path.encode(),
            len(content),
            content,
        )

    async def send(self) -> None:
        assert self._address.hostname
        self.reader, self._writer = await asyncio.open_connection(self._address.hostname, self._address.port)
        self._writer.write(self._request)
        await self._writer.drain()

    async def leave(self) -> None:
        self._writer.close()
        await self._writer.wait_closed()


def nothing_left(server: RunningServer) -> bool:
    return (
        server.metric("vllm:num_requests_running") == 0
        and server.metric("vllm:num_requests_waiting") == 0
        and server.metric("warmpath:num_free_blocks") == 1024
    )


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", ENDLESS | {"stream": True}),
        ("/v1/completions", ENDLESS | {"stream": False}),
        ("/v1/completions", ENDLESS | {"stream": True, "n": 3}),
        ("/v1/completions", ENDLESS | {"stream": False, "n": 3}),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "a"}], "ignore_eos": True, "stream": True},
        ),
    ],
)
async def test_a_disconnect_aborts_the_requests_in_the_engine(
    server: RunningServer, path: str, body: dict[str, Any]
) -> None:
    choices = body.get("n", 1)
    aborted = server.metric("vllm:request_success_total", finished_reason="abort")
    client = RawClient(server, path, body)
    await client.send()
    if body.get("stream"):
        await client.reader.readuntil(b"data: ")
    await until(lambda: server.metric("vllm:num_requests_running") == choices)
    await client.leave()
    await until(lambda: nothing_left(server))
    assert server.metric("vllm:request_success_total", finished_reason="abort") == aborted + choices
    assert server.metric("warmpath:integrity") == 1


async def test_a_disconnect_while_queued_and_a_full_queue(start_server: StartServer) -> None:
    with start_server("--max-num-seqs", "1", "--max-waiting", "1") as server:
        running = RawClient(server, "/v1/completions", ENDLESS | {"stream": True})
        await running.send()
        await running.reader.readuntil(b"data: ")
        waiting = RawClient(server, "/v1/completions", ENDLESS | {"stream": True})
        await waiting.send()
        await until(lambda: server.metric("vllm:num_requests_waiting") == 1)
        refused = httpx2.post(f"{server.base_url}/completions", json={"model": server.model} | ENDLESS)
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "overloaded"
        assert 1 <= int(refused.headers["retry-after"]) <= 120
        await waiting.leave()
        await until(lambda: server.metric("vllm:num_requests_waiting") == 0)
        assert server.metric("vllm:num_requests_running") == 1
        assert server.metric("vllm:request_success_total", finished_reason="abort") == 1

        # A request's choices are accepted all or none.
        refused = httpx2.post(f"{server.base_url}/completions", json={"model": server.model, "n": 2} | ENDLESS)
        assert refused.status_code == 503
        await until(lambda: server.metric("vllm:num_requests_waiting") == 0)
        await running.leave()
        await until(lambda: nothing_left(server))
        generated = server.metric("vllm:generation_tokens_total")
        refused = httpx2.post(f"{server.base_url}/completions", json={"model": server.model, "n": 3} | ENDLESS)
        assert refused.status_code == 400  # it can never be accepted
        assert refused.json()["error"]["param"] == "n"
        assert server.metric("vllm:generation_tokens_total") == generated


async def test_a_full_queue_displaces_its_least_urgent_request(start_server: StartServer) -> None:
    with start_server("--max-num-seqs", "1", "--max-waiting", "1") as server:
        running = RawClient(server, "/v1/completions", ENDLESS | {"stream": True, "priority": 10})
        await running.send()
        await running.reader.readuntil(b"data: ")
        waiting = RawClient(server, "/v1/completions", ENDLESS | {"stream": True, "priority": 10})
        await waiting.send()
        await until(lambda: server.metric("vllm:num_requests_waiting") == 1)
        body = {"model": server.model, "prompt": "The quick", "max_tokens": 3}
        reply = await asyncio.to_thread(lambda: httpx2.post(f"{server.base_url}/completions", json=body, timeout=60))
        assert reply.status_code == 200
        head = (await waiting.reader.readuntil(b"\r\n\r\n")).lower()
        assert head.startswith(b"http/1.1 503")
        assert 1 <= int(head.split(b"retry-after: ")[1].split(b"\r\n")[0]) <= 120
        assert b'"overloaded"' in await waiting.reader.readuntil(b"}}")
        request_id = head.split(b"x-request-id: ")[1].split(b"\r\n")[0].decode()
        usage = httpx2.get(f"{server.url}/requests/{request_id}").json()["usage"]
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (0, 0)  # nothing was computed
        assert server.metric("vllm:request_success_total", finished_reason="displaced") == 1
        await waiting.leave()
        await running.leave()
        await until(lambda: nothing_left(server))


async def test_a_stop_sequence_ends_the_request_in_the_engine(server: RunningServer) -> None:
    generated = server.metric("vllm:generation_tokens_total")
    body = {"model": server.model, "stop": ["e", "o", "a"]} | ENDLESS
    reply = await asyncio.to_thread(lambda: httpx2.post(f"{server.base_url}/completions", json=body, timeout=60))
    assert reply.json()["choices"][0]["finish_reason"] == "stop"
    await until(lambda: nothing_left(server))
    assert server.metric("vllm:generation_tokens_total") < generated + ENDLESS["max_tokens"]


async def test_after_the_drain_open_streams_end_with_an_error(start_server: StartServer) -> None:
    with start_server("--drain-seconds", "0.2") as server:
        client = server.client(strict=False)
        stream = client.completions.create(
            model=server.model,
            prompt="The quick",
            max_tokens=8000,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        next(iter(stream))
        whole = RawClient(server, "/v1/completions", ENDLESS)
        await whole.send()
        await until(lambda: server.metric("vllm:num_requests_running") == 2)
        server.process.send_signal(signal.SIGTERM)
        with pytest.raises(openai.APIError) as caught:
            for _ in stream:
                pass
        assert caught.value.code == "shutting_down"
        head = await whole.reader.readuntil(b"\r\n")
        assert b"503" in head
        await whole.leave()


async def test_a_short_response_finishes_during_the_drain(start_server: StartServer) -> None:
    with start_server("--drain-seconds", "30") as server:
        stream = server.client(strict=False).completions.create(
            model=server.model,
            prompt="The quick",
            max_tokens=100,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        chunks = iter(stream)
        next(chunks)
        server.process.send_signal(signal.SIGTERM)
        assert list(chunks)[-1].choices[0].finish_reason == "length"
