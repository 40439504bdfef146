"""Token counting through all phases, with deployments that can count and deployments that cannot."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

from gateway.endpoints import COUNTING_ENDPOINTS
from gateway.serve import handle
from gateway.token_counting import TokenCounting
from gateway.types import Outcome
from tests.gateway.harness import Client, Rig, a_rig, in_time, tenant

DOOR = next(endpoint for endpoint in COUNTING_ENDPOINTS if endpoint.path == "messages/count_tokens")
HELLO = {"role": "user", "content": "hello"}


async def count(rig: Rig, client: Client | None = None, **fields: Any) -> Client:
    body = json.dumps({"model": "m", "messages": [HELLO], **fields}).encode()
    client = client or Client(body, path="/v1/messages/count_tokens")
    story = TokenCounting(rig.fleet).count
    await in_time(handle(rig.components, DOOR, client.scope, client.receive, client.send, story=story))
    return client


async def test_the_servers_own_tokenizer_is_asked(tmp_path: Path) -> None:
    async with a_rig(tmp_path) as rig:
        rig.servers["b"].prompt_tokens = 42  # a has none that it would tell
        client = await count(rig, system="be brief")
        assert (client.status, client.json) == (200, {"input_tokens": 42})
        assert client.headers["request-id"] == client.headers["x-request-id"]
        assert not rig.receipts() and not rig.replies
        (record,) = rig.telemetry.records
        assert (record.operation, record.outcome, record.call) == (None, Outcome.COMPLETE, None)


async def test_where_nobody_tells_there_is_no_number(tmp_path: Path) -> None:
    async with a_rig(tmp_path) as rig:
        rig.servers["c"].prompt_tokens = 42  # only a fallback, whose tokens are others
        client = await count(rig)
        assert (client.status, client.headers["x-should-retry"]) == (501, "false")
        assert client.json["error"]["details"]["error_code"] == "not_counted"


async def test_it_counts_as_a_request_and_gives_all_else_back(tmp_path: Path) -> None:
    async with a_rig(tmp_path, tenants=[tenant(requests="2/1h", tokens="2000/1h", concurrency=1)]) as rig:
        rig.servers["a"].prompt_tokens = 42
        for _ in range(2):
            assert (await count(rig, system="x" * 7000)).status == 200
        refused = await count(rig)
        assert (refused.status, refused.json["error"]["type"]) == (429, "rate_limit_error")


async def test_who_may_not_use_a_model_is_told_nothing_of_it(tmp_path: Path) -> None:
    async with a_rig(tmp_path) as rig:
        assert (await count(rig, model="none")).status == 404
        assert (await count(rig, Client(b"{}", key="wp-dev-wrong"))).json["error"]["type"] == "authentication_error"
        assert (await count(rig, max_tokens=1)).json["error"]["details"] == {"param": "max_tokens"}


async def test_a_client_that_leaves_waits_for_nobody(tmp_path: Path) -> None:
    async with a_rig(tmp_path) as rig:
        asked = asyncio.Event()

        async def never(call: Any) -> None:
            asked.set()
            await asyncio.Event().wait()

        rig.servers["a"].count_prompt_tokens = never  # type: ignore[method-assign]
        client = Client(json.dumps({"model": "m", "messages": [HELLO]}).encode())
        counting = asyncio.create_task(count(rig, client))
        await in_time(asked.wait())
        client.leave()
        await in_time(counting)
        assert client.status == 0 and rig.telemetry.records[0].outcome is Outcome.CLIENT_GONE


async def test_hooks_see_a_prompt_before_a_server_counts_it(tmp_path: Path) -> None:
    hooks = [{"name": "h", "before": "tests.gateway.hooks.functions:reject"}]
    async with a_rig(tmp_path, hooks=hooks) as rig:
        rig.servers["a"].prompt_tokens = 42
        assert (await count(rig)).status == 422
