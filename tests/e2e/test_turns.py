"""The queue's order over real sockets: a tenant does not wait behind another's crowd, and batch comes last."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import httpx2
import pytest

from tests.e2e.faults.upstreams import Request, listening
from tests.e2e.processes import PATIENCE_SECONDS, gateway, key, tenant, until

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

CROWD = 60


@pytest.mark.parametrize(("share", "batch_turn"), [("0%", CROWD + 1), ("50%", 2)])
async def test_one_call_does_not_wait_behind_a_crowd(tmp_path: Path, share: str, batch_turn: int) -> None:
    opened = threading.Event()

    async def patient(request: Request) -> None:
        while not opened.is_set():
            await asyncio.sleep(0.01)
        await request.whole(tokens=1)

    with listening({"only": patient}) as upstreams:
        url = f"http://127.0.0.1:{upstreams.ports['only']}/v1"
        policy = {
            "deployments": [{"name": "only", "base_url": url, "model": "m", "max_concurrency": 1}],
            "models": [{"name": "m", "deployments": ["only"]}],
            "classes": {"realtime": {"max_wait": "60s"}, "batch": {"min_share": share}},
            "rules": [{"match": {"service_tier": "flex"}, "class": "batch"}],
            "cache": {"scope": "off"},
            "tenants": [tenant("crowd"), tenant("single")],
        }
        with gateway(tmp_path, policy) as front:
            async with httpx2.AsyncClient(
                timeout=PATIENCE_SECONDS, limits=httpx2.Limits(max_connections=100)
            ) as client:

                async def ask(who: str, **fields: str) -> int:
                    body = {"model": "m", "messages": [{"role": "user", "content": "Hi."}], "max_tokens": 9}
                    reply = await client.post(
                        f"{front.url}/v1/chat/completions",
                        json={**body, "user": who, **fields},
                        headers={"authorization": f"Bearer {key(who)}"},
                    )
                    return reply.status_code

                async def waiting(count: int) -> None:
                    await asyncio.to_thread(until, lambda: front.metric("warmpath_queue_depth") == count)

                requests = [asyncio.create_task(ask("crowd")) for _ in range(CROWD)]
                await waiting(CROWD - 1)
                requests.append(asyncio.create_task(ask("single")))
                await waiting(CROWD)
                requests.append(asyncio.create_task(ask("single", service_tier="flex")))
                await waiting(CROWD + 1)
                opened.set()
                assert set(await asyncio.gather(*requests)) == {200}
        bodies = [request.body for request in upstreams.requests["only"]]
        batch, single = (
            next(
                turn
                for turn, body in enumerate(bodies)
                if body["user"] == "single" and ("service_tier" in body) == flex
            )
            for flex in (True, False)
        )
        assert batch == batch_turn
        assert single <= 3, "one of the crowd was in flight, one was first in the queue, and batch had its share"
