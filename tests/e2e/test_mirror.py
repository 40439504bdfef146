"""Mirrored calls and weights between the deployments of one model, with real processes and sockets."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e.faults.upstreams import TOKENS, Behaviour, Request, Upstreams, listening
from tests.e2e.processes import PRICE, Gateway, gateway, simple_policy, until

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

SESSIONS = 100


class Gate:
    """A behaviour that answers only after the test calls `open`."""

    def __init__(self) -> None:
        self._opened = threading.Event()

    def open(self) -> None:
        self._opened.set()

    async def __call__(self, request: Request) -> None:
        while not self._opened.is_set():  # the test runs in another thread
            await asyncio.sleep(0.01)
        await request.whole()


async def works(request: Request) -> None:
    await request.whole()


async def other(request: Request) -> None:
    await request.whole(TOKENS - 1)


async def fails(request: Request) -> None:
    await request.refuse("500 Internal Server Error")


@pytest.fixture(scope="module")
def front(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Gateway, Upstreams, Gate]]:
    gate = Gate()
    behaviours: dict[str, Behaviour] = {
        "main": works, "same": works, "other": other, "fails": fails, "slow": gate, "a": works, "b": works,
    }  # fmt: skip
    with listening(behaviours) as upstreams:
        deployments = [
            {"name": name, "base_url": f"http://127.0.0.1:{port}/v1", "model": "served", "price": PRICE}
            for name, port in upstreams.ports.items()
        ]
        models: list[dict[str, Any]] = [
            {"name": f"to-{name}", "deployments": ["main"], "mirror": {"deployment": name, "max_in_flight": 2}}
            for name in ("same", "other", "fails", "slow")
        ]
        models += [
            {"name": "some", "deployments": ["main"], "mirror": {"deployment": "same", "share": "0%"}},
            {"name": "weighted", "deployments": ["a", "b"], "weights": {"a": 80, "b": 20}},
            {"name": "half-dead", "deployments": ["fails", "a"], "weights": {"fails": 1}},
        ]
        policy = simple_policy("http://unused", deployments=deployments, models=models)
        with gateway(tmp_path_factory.mktemp("mirror"), policy) as started:
            yield started, upstreams, gate


def chat(model: str, **more: Any) -> dict[str, Any]:
    return {"model": model, "messages": [{"role": "user", "content": "hi"}], **more}


def mirrored(front_gateway: Gateway, name: str, outcome: str) -> float:
    return front_gateway.metric("warmpath_mirrored_total", deployment=name, model=f"to-{name}", outcome=outcome)


@pytest.mark.parametrize("stream", [False, True])
def test_copies_are_compared_and_billed_to_nobody(front: tuple[Gateway, Upstreams, Gate], stream: bool) -> None:
    front_gateway, upstreams, _ = front
    for name, differs in (("same", 0.0), ("other", 1.0)):
        compared = mirrored(front_gateway, name, "compared")
        different = front_gateway.metric("warmpath_mirror_different_total", deployment=name, what="text")
        billed = len(front_gateway.receipts())
        reply = front_gateway.post("chat/completions", chat(f"to-{name}", stream=stream, temperature=0.5))
        assert reply.status_code == 200 and reply.headers["x-warmpath-deployment"] == "main"
        until(lambda: mirrored(front_gateway, name, "compared") == compared + 1)  # noqa: B023
        for what in ("text", "output"):
            counted = front_gateway.metric("warmpath_mirror_different_total", deployment=name, what=what)
            assert counted == different + differs, (name, what)
        copy = upstreams.requests[name][-1]
        assert copy.body["temperature"] == 0.5 and copy.body["model"] == "served"
        assert copy.headers["x-request-id"].endswith("-mirror")
        assert len(front_gateway.receipts()) == billed + 1
    tokens = [front_gateway.metric("warmpath_mirror_output_tokens_total", deployment="other", side=side)
              for side in ("client", "mirror")]  # fmt: skip
    assert tokens[0] > tokens[1] > 0
    log = [line for line in front_gateway.log.read_text().splitlines() if "mirrored a call" in line]
    assert any("equal_text=False" in line or '"equal_text":false' in line for line in log), log


def test_a_failing_mirror_harms_neither_clients_nor_its_circuit_breaker(
    front: tuple[Gateway, Upstreams, Gate],
) -> None:
    front_gateway, _, _ = front
    for _ in range(8):
        assert front_gateway.post("chat/completions", chat("to-fails")).status_code == 200
        sent = sum(mirrored(front_gateway, "fails", outcome) for outcome in ("status_500", "busy"))
        assert sent <= 8
    until(lambda: mirrored(front_gateway, "fails", "status_500") >= 2)
    assert front_gateway.metric("warmpath_deployment_available", deployment="fails") == 1


def test_copies_beyond_the_bound_are_dropped_and_delay_no_one(front: tuple[Gateway, Upstreams, Gate]) -> None:
    front_gateway, upstreams, gate = front
    for _ in range(5):
        assert front_gateway.post("chat/completions", chat("to-slow")).status_code == 200
    until(lambda: mirrored(front_gateway, "slow", "busy") == 3)
    assert upstreams.request_count("slow") == 2
    gate.open()
    until(lambda: mirrored(front_gateway, "slow", "compared") == 2)
    before = upstreams.request_count("same")
    for _ in range(5):
        assert front_gateway.post("chat/completions", chat("some")).status_code == 200
    assert upstreams.request_count("same") == before and mirrored(front_gateway, "same", "busy") == 0


def test_weights_divide_conversations_which_stay_where_they_are(front: tuple[Gateway, Upstreams, Gate]) -> None:
    front_gateway, _, _ = front
    chosen: dict[str, set[str]] = {}
    with front_gateway.client() as client:
        for number in [*range(SESSIONS), *range(SESSIONS)]:
            session: Any = {"prompt_cache_key": f"s{number}", "messages": [{"role": "user", "content": "hi"}]}
            reply = client.chat.completions.with_raw_response.create(model="weighted", **session)
            chosen.setdefault(f"s{number}", set()).add(reply.headers["x-warmpath-deployment"])
    assert all(len(deployments) == 1 for deployments in chosen.values())
    counts = Counter(name for deployments in chosen.values() for name in deployments)
    assert 0.7 * SESSIONS <= counts["a"] <= 0.9 * SESSIONS, counts
    for number in range(4):
        sent = front_gateway.post("chat/completions", chat("half-dead", prompt_cache_key=f"s{number}"))
        assert (sent.status_code, sent.headers["x-warmpath-deployment"]) == (200, "a")
