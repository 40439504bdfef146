"""Redis loses its data under two gateways: they rebuild the budgets from their ledgers, at once and after a restart."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from decimal import Decimal
from pathlib import Path
from typing import Any

import httpx2
import pytest

from gateway.limits.slices import REPORT_SECONDS
from tests.e2e.processes import DEMO, PATIENCE_SECONDS, Gateway, Running, gateway, simple_policy, tenant, until
from tests.redis_server import RedisServer, own_redis_server

__all__ = ["own_redis_server"]
pytestmark = [pytest.mark.e2e, pytest.mark.slow]

ADMIN_KEY = "an-admin-key-of-some-length"
BUDGET = {"budget": {"amount": 10, "per": "month"}}
USERS = ("ada", "bob")
TENANTS = ("dev", "team", "small")


def left(front: Gateway, name: str, user: str) -> dict[str, Decimal]:
    """What is left of each budget of a tenant and of one end user."""
    headers = {"authorization": f"Bearer {ADMIN_KEY}"}
    url = f"{front.admin_url}/admin/limits/{name}?end_user={user}"
    limits: list[dict[str, Any]] = httpx2.get(url, headers=headers, timeout=PATIENCE_SECONDS).json()["limits"]
    return {each["scope"]: Decimal(each["left"]) for each in limits}


def spent(fronts: list[Gateway], name: str, user: str | None = None) -> Decimal:
    receipts = [receipt for front in fronts for receipt in front.receipts(tenant=name)]
    return sum((Decimal(each["cost"]) for each in receipts if user in (None, each["end_user"])), Decimal(0))


def test_budgets_of_every_level_are_rebuilt(
    tmp_path: Path, local_engine: Running, own_redis_server: RedisServer
) -> None:
    policy = simple_policy(
        local_engine.url,
        models=[{"name": DEMO, "deployments": ["local"], "price": {"input": "1000", "output": "2000.123"}}],
        tenants=[
            tenant("dev", limits={**BUDGET, "end_users": BUDGET}),
            tenant("team", parent="dev", limits=BUDGET),
            tenant("small", limits={"budget": {"amount": "0.3", "per": "day"}}),  # too small for slices
        ],
    )
    common: dict[str, Any] = {"storage": own_redis_server.url, "admin_key": ADMIN_KEY, "admin_port": "0"}

    def accounts_are_right(fronts: list[Gateway]) -> bool:
        both = spent(fronts, "dev") + spent(fronts, "team")
        for user in USERS:
            of_user = spent(fronts, "dev", user) + spent(fronts, "team", user)
            if left(fronts[0], "dev", user) != {"tenant dev": 10 - both, "the end user of tenant dev": 10 - of_user}:
                return False
        return left(fronts[0], "team", "ada")["tenant team"] == 10 - spent(fronts, "team") and left(
            fronts[0], "small", "ada"
        )["tenant small"] == Decimal("0.3") - spent(fronts, "small")

    @contextmanager
    def running() -> Iterator[list[Gateway]]:
        with ExitStack() as started:
            yield [started.enter_context(gateway(tmp_path / name, policy, replica=name, **common)) for name in "ab"]

    with running() as fronts:
        for number in range(12):
            body = {"model": DEMO, "prompt": [100 + number], "max_tokens": 2, "user": USERS[number % 2]}
            assert fronts[number // 6].post("completions", body, TENANTS[number % 3]).status_code == 200
        until(lambda: accounts_are_right(fronts))
        time.sleep(2 * REPORT_SECONDS)  # what ended just before the loss may be counted twice
        flush(own_redis_server)
        until(lambda: accounts_are_right(fronts))
    flush(own_redis_server)
    with running() as fronts:
        until(lambda: accounts_are_right(fronts))
        assert fronts[0].post("completions", {"model": DEMO, "prompt": [1], "max_tokens": 2}).status_code == 200
        until(lambda: accounts_are_right(fronts))


def flush(server: RedisServer) -> None:
    with server.client() as client:
        client.flushall()
