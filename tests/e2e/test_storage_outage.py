"""Redis hangs or is killed under two gateways: calls continue within local shares, or are rejected."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.e2e.processes import DEMO, Gateway, Running, gateway, simple_policy, tenant, until
from tests.redis_server import RedisServer, own_redis_server

__all__ = ["own_redis_server"]
pytestmark = [pytest.mark.e2e, pytest.mark.slow]

REQUESTS = 30  # too few for slices, so each gateway knows what is left
BODY = {"model": DEMO, "prompt": [100, 101], "max_tokens": 1}


@contextmanager
def gateways(folder: Path, engine: Running, server: RedisServer, **outage: Any) -> Iterator[list[Gateway]]:
    policy = simple_policy(
        engine.url,
        tenants=[tenant("dev", limits={"requests": f"{REQUESTS}/1d"}), tenant("free")],
        storage_outage=outage,
    )
    with ExitStack() as started:
        yield [
            started.enter_context(gateway(folder / name, policy, storage=server.url, replica=name))
            for name in ("a", "b")
        ]


def ask(fronts: list[Gateway], times: int, who: str = "dev") -> Counter[int]:
    """Send so many requests to each gateway. Returns the number of replies by status."""
    with ThreadPoolExecutor(8) as threads:
        replies = threads.map(lambda number: fronts[number % 2].post("completions", BODY, who), range(2 * times))
        return Counter(reply.status_code for reply in replies)


def settled(front: Gateway) -> bool:
    return all(front.metric(f"warmpath_limits_{what}") == 0 for what in ("local", "untold", "unsettled"))


@pytest.mark.parametrize("how", ["frozen", "killed"])
def test_calls_continue_within_local_shares_and_are_settled_later(
    tmp_path: Path, local_engine: Running, own_redis_server: RedisServer, how: str
) -> None:
    with own_redis_server.client() as client:
        client.config_set("appendfsync", "always")
    with gateways(tmp_path, local_engine, own_redis_server, limits="local_share", replicas=2) as fronts:
        assert ask(fronts, 5) == {200: 10}
        for front in fronts:
            until(lambda front=front: settled(front))
        if how == "frozen":
            own_redis_server.freeze()
        else:
            own_redis_server.stop()
        count = ask(fronts, REQUESTS)
        # Each has half of the twenty that were left, or half of the remainder that it last read.
        assert 20 <= count[200] <= 20 + 10
        assert count[200] + count[429] == 2 * REQUESTS
        for front in fronts:
            assert front.metric("warmpath_limits_local") == 1
            assert httpx2.get(f"{front.url}/ready").json()["status"] == "ready"
        if how == "frozen":
            own_redis_server.thaw()
        else:
            own_redis_server.start()
        for front in fronts:
            until(lambda front=front: settled(front))
        granted = sum(front.metric("warmpath_limits_local_calls_total", verdict="granted") for front in fronts)
        assert granted >= 20 - 2  # one per gateway may have been decided by Redis
        assert ask(fronts, 5)[200] == 0  # all thirty are used up, and settled in Redis
        assert sum(len(front.receipts(tenant="dev")) for front in fronts) == 10 + count[200]


def test_limited_calls_are_rejected_and_none_hangs(
    tmp_path: Path, local_engine: Running, own_redis_server: RedisServer
) -> None:
    with gateways(tmp_path, local_engine, own_redis_server, limits="refuse") as fronts:
        own_redis_server.freeze()
        try:
            assert ask(fronts, 5) == {503: 10}
            assert ask(fronts, 5, "free") == {200: 10}  # a tenant without limits needs no storage
            assert httpx2.get(f"{fronts[0].url}/ready").status_code == 503
        finally:
            own_redis_server.thaw()
        until(lambda: ask(fronts, 1) == {200: 2})
