"""Two gateways on one Redis, and two hundred calls at once: what a limit allows is granted, and never more."""

from __future__ import annotations

import asyncio
import secrets
from collections import Counter
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest

from tests.e2e.processes import (
    DEMO,
    PATIENCE_SECONDS,
    Gateway,
    Running,
    chat,
    gateway,
    key,
    simple_policy,
    tenant,
    until,
)
from tests.redis_server import RedisServer

pytestmark = pytest.mark.e2e

CALLS = 200
PLACES = 5
REQUESTS = 30
TOKENS = 3000
BUDGET = "0.0002"  # of which a call of 100 output tokens reserves 0.00004 and more


@pytest.fixture(scope="module")
def twins(
    tmp_path_factory: pytest.TempPathFactory, local_engine: Running, redis_server: RedisServer
) -> Iterator[list[Gateway]]:
    folder = tmp_path_factory.mktemp("twins")
    policy = simple_policy(
        local_engine.url,
        tenants=[
            tenant("requests", limits={"requests": f"{REQUESTS}/1h"}),
            tenant("tokens", limits={"tokens": f"{TOKENS}/1h"}),
            tenant("places", limits={"concurrency": PLACES}),
            tenant("money", limits={"budget": {"amount": BUDGET, "per": "total"}}),
        ],
    )
    with (
        gateway(folder / "a", policy, storage=redis_server.url, replica="a") as a,
        gateway(folder / "b", policy, storage=redis_server.url, replica="b") as b,
    ):
        yield [a, b]


async def at_once(
    twins: list[Gateway], who: str, body: dict[str, Any], path: str = "chat/completions"
) -> list[httpx2.Response]:
    """All calls together, every other one at the other gateway."""
    async with httpx2.AsyncClient(timeout=PATIENCE_SECONDS, limits=httpx2.Limits(max_connections=CALLS)) as client:
        calls = [
            client.post(
                f"{twins[number % 2].url}/v1/{path}",
                json=body,
                headers={"authorization": f"Bearer {key(who)}"},
            )
            for number in range(CALLS)
        ]
        return await asyncio.gather(*calls)


def statuses(replies: list[httpx2.Response]) -> Counter[int]:
    return Counter(reply.status_code for reply in replies)


async def test_requests(twins: list[Gateway]) -> None:
    replies = await at_once(twins, "requests", chat(max_tokens=1))
    # 30 an hour: not one more comes back while the test runs.
    assert statuses(replies) == {200: REQUESTS, 429: CALLS - REQUESTS}
    for reply in replies:
        assert reply.headers["x-ratelimit-limit-requests"] == str(REQUESTS)
        if reply.status_code == 429:
            assert reply.json()["error"]["code"] == "rate_limit_exceeded"
            assert int(reply.headers["retry-after-ms"]) > 0
    assert sum(len(front.receipts(tenant="requests")) for front in twins) == REQUESTS


async def test_tokens(twins: list[Gateway]) -> None:
    """The prompt as token ids, so that what a call will use is known before: a fortieth of the limit."""
    body = {"model": DEMO, "prompt": list(range(100, 115)), "max_tokens": 60, "ignore_eos": True}
    replies = await at_once(twins, "tokens", body, "completions")
    assert statuses(replies) == {200: TOKENS // 75, 429: CALLS - TOKENS // 75}
    assert {reply.json()["usage"]["total_tokens"] for reply in replies if reply.status_code == 200} == {75}
    receipts = [row for front in twins for row in front.receipts(tenant="tokens")]
    assert sum(row["input_uncached"] + row["cache_read"] + row["output"] for row in receipts) == TOKENS


async def test_concurrency(twins: list[Gateway], local_engine: Running) -> None:
    """Streams that do not end before all have been answered: whoever got a place still has it."""
    body = chat(stream=True, max_tokens=1800, ignore_eos=True)
    granted: list[httpx2.Response] = []
    refused = 0
    async with httpx2.AsyncClient(timeout=PATIENCE_SECONDS, limits=httpx2.Limits(max_connections=CALLS)) as client:

        async def ask(front: Gateway) -> None:
            nonlocal refused
            headers = {"authorization": f"Bearer {key('places')}"}
            request = client.build_request("POST", f"{front.url}/v1/chat/completions", json=body, headers=headers)
            reply = await client.send(request, stream=True)
            if reply.status_code == 200:
                granted.append(reply)
            else:
                assert reply.status_code == 429
                refused += 1
                await reply.aread()

        await asyncio.gather(*(ask(twins[number % 2]) for number in range(CALLS)))
        assert (len(granted), refused) == (PLACES, CALLS - PLACES)
        assert local_engine.metric("vllm:num_requests_running") == PLACES
        await asyncio.gather(*(reply.aclose() for reply in granted))
    until(lambda: local_engine.metric("vllm:num_requests_running") == 0)
    until(lambda: sum(len(front.receipts(tenant="places", outcome="client_gone")) for front in twins) == PLACES)
    # All places are free again, and each only once.
    replies = await at_once(twins, "places", chat(secrets.token_hex(4), max_tokens=1))
    assert statuses(replies)[200] >= PLACES


async def test_money(twins: list[Gateway]) -> None:
    replies = await at_once(twins, "money", chat(max_tokens=100, ignore_eos=True))
    count = statuses(replies)
    assert set(count) == {200, 429}
    spent = sum(float(row["cost"]) for front in twins for row in front.receipts(tenant="money"))
    assert 0 < spent <= float(BUDGET)
    # Some found the rest merely held by calls in flight, and may come again; in the end nothing fits any more.
    codes = Counter(reply.json()["error"]["code"] for reply in replies if reply.status_code == 429)
    assert set(codes) <= {"insufficient_quota", "rate_limit_exceeded"}
    final = await at_once(twins, "money", chat(max_tokens=400))
    assert statuses(final) == {429: CALLS}
    assert {reply.json()["error"]["code"] for reply in final} == {"insufficient_quota"}
