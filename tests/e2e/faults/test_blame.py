"""Who pays for a failure, with real sockets: one server's or one tenant's fault costs no other party an answer."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest

from tests.e2e.faults.upstreams import Behaviour, Request, Upstreams, listening
from tests.e2e.processes import PATIENCE_SECONDS, PRICE, Gateway, gateway, key, tenant
from tests.gateway.providers.scripted_server import json_response

pytestmark = pytest.mark.e2e

WORDS = "the grammar is too deep"


def is_bad(request: Request) -> bool:
    return "bad" in json.dumps(request.body)


async def good(request: Request) -> None:
    await request.whole()


async def llamacpp_without_images(request: Request) -> None:
    """As llama.cpp's server does for what it was not started for."""
    if request.path.endswith("/embeddings"):
        await request.refuse("501 Not Implemented", code="not_supported_error")
    elif "image_url" in json.dumps(request.body):
        error = {"error": {"code": 500, "message": "image input is not supported - hint: provide the mmproj"}}
        await request.write(json_response(json.dumps(error).encode(), "500 Internal Server Error"))
    else:
        await asyncio.sleep(0.02)
        await request.whole()


async def fails_at_bad_requests(request: Request) -> None:
    """As an engine whose grammar compiler fails: at once, while answers take longer."""
    if is_bad(request):
        error = {"error": {"message": WORDS, "type": "server_error"}}
        await request.write(json_response(json.dumps(error).encode(), "500 Internal Server Error"))
    else:
        await asyncio.sleep(0.05)
        await request.whole()


def answers(status: str, body: bytes) -> Behaviour:
    async def behave(request: Request) -> None:
        await request.write(json_response(body, status))

    return behave


SETUP_FAILURES: dict[str, Behaviour] = {
    "wrong-model": answers("404 Not Found", b'{"error": {"message": "The model `m` does not exist", "code": 404}}'),
    "wrong-path": answers("404 Not Found", b'{"detail": "Not Found"}'),
    "wrong-key": answers("401 Unauthorized", b'{"error": {"message": "Incorrect API key provided: sk-secret"}}'),
    "no-credit": answers("402 Payment Required", b'{"error": {"message": "Insufficient credits"}}'),
    "forbidden": answers("403 Forbidden", b"{}"),
}
SERVERS: dict[str, Behaviour] = {
    "llamacpp": llamacpp_without_images, "engine": fails_at_bad_requests, "good": good, **SETUP_FAILURES,
}  # fmt: skip


@pytest.fixture(scope="module")
def upstreams() -> Iterator[Upstreams]:
    with listening(SERVERS) as started:
        yield started


@pytest.fixture(scope="module")
def front(upstreams: Upstreams, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    policy = {
        "deployments": [
            {
                "name": name, "base_url": f"http://127.0.0.1:{port}/v1", "model": "m", "price": PRICE,
                # A wrongly configured deployment looks fastest, because it answers at once.
                "prefill_tokens_per_second": "1M" if name in SETUP_FAILURES else "1k",
            }
            for name, port in upstreams.ports.items()
        ],
        "models": [
            {"name": "llamacpp", "deployments": ["llamacpp"]},
            {"name": "engine", "deployments": ["engine"]},
            *({"name": name, "deployments": [name, "good"]} for name in SETUP_FAILURES),
        ],
        "cache": {"scope": "off"},
        "tenants": [tenant("dev"), tenant("hostile")],
    }  # fmt: skip
    with gateway(tmp_path_factory.mktemp("blame"), policy) as started:
        yield started


async def ask(front: Gateway, model: str, content: Any, *, who: str = "dev", path: str = "chat/completions") -> Any:
    async with httpx2.AsyncClient(timeout=PATIENCE_SECONDS, verify=False) as client:
        prompt = {"input": content} if path == "embeddings" else {"messages": [{"role": "user", "content": content}]}
        return await client.post(
            f"{front.url}/v1/{path}", json={"model": model, **prompt}, headers={"authorization": f"Bearer {key(who)}"}
        )


async def test_requests_that_a_server_does_not_support_cost_the_others_nothing(
    front: Gateway, upstreams: Upstreams
) -> None:
    """A hundred good requests beside images and embeddings, at a llama.cpp server that has neither."""
    image = [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}]
    calls = [ask(front, "llamacpp", f"good {number}") for number in range(100)]
    for number in range(0, 100, 8):
        calls.insert(number, ask(front, "llamacpp", image, who="hostile"))
        calls.insert(number, ask(front, "llamacpp", f"text {number}", who="hostile", path="embeddings"))
    slots = asyncio.Semaphore(8)

    async def one(call: Any) -> Any:
        async with slots:
            return await call

    replies = await asyncio.gather(*map(one, calls))
    statuses = [reply.status_code for reply in replies]
    assert (statuses.count(200), statuses.count(500), statuses.count(501)) == (100, 13, 13)
    assert {reply.headers.get("x-should-retry") for reply in replies if reply.status_code != 200} == {"false"}
    image_reply = next(reply for reply in replies if reply.status_code == 500)
    assert "image input is not supported" in image_reply.json()["error"]["message"]
    assert upstreams.request_count("llamacpp") == 126, "each was sent once"


@pytest.mark.slow
async def test_hostile_clients_do_not_open_the_breaker(front: Gateway, upstreams: Upstreams) -> None:
    """Eight clients with requests that fail, each a new one, beside one client with good requests."""
    stop = asyncio.Event()

    async def hostile(client: int) -> None:
        number = 0
        while not stop.is_set():
            number += 1
            reply = await ask(front, "engine", f"bad {client} {number}", who="hostile")
            assert reply.status_code in (500, 502)
            assert WORDS in reply.json()["error"]["message"]

    clients = [asyncio.create_task(hostile(client)) for client in range(8)]
    for number in range(40):
        assert (await ask(front, "engine", f"good {number}")).status_code == 200
    stop.set()
    await asyncio.gather(*clients)
    assert front.metric("warmpath_deployment_breaker", deployment="engine", state="open") == 0
    assert "engine" not in httpx2.get(f"{front.url}/ready").json()["unavailable"]


@pytest.mark.parametrize("name", SETUP_FAILURES)
async def test_a_wrongly_configured_deployment_gets_no_traffic(front: Gateway, upstreams: Upstreams, name: str) -> None:
    replies = [await ask(front, name, f"question {number}") for number in range(30)]
    assert {reply.status_code for reply in replies} == {200}
    assert upstreams.request_count(name) <= 2, "once, and perhaps a probe"
    state = httpx2.get(f"{front.url}/ready")
    assert state.status_code == 200, "the gateway itself works"
    reason = state.json()["unavailable"][name]
    assert reason.startswith("ejected: status 40") and "secret" not in reason
    attempts = front.receipt(replies[0].headers["x-request-id"])["attempts"]
    assert [attempt["deployment"] for attempt in attempts] == [name, "good"]
    assert f"{name}: {reason.replace('ejected:', 'ejected for 5 s:')}" in front.log.read_text()
