"""Streams that cost more than was reserved: cut if the policy says so, and only when no money is left."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gateway.core.errors import StorageUnavailable
from gateway.types import Outcome
from tests.gateway.doubles import ScriptedResponse
from tests.gateway.harness import DONE, Client, Rig, a_rig, chat, delta, in_time, settle, tenant, usage_frame

STREAM = chat(stream=True)
TOKEN_NANOS = 2_000  # at 2 per million
BUDGET_NANOS = 40_000


def small_budget(*, cut_streams: bool = True) -> list[dict[str, Any]]:
    """A tenant for whose calls four tokens are reserved. The budget pays for fewer than twenty."""
    budget = {"amount": "0.00004", "per": "total", "cut_streams": cut_streams}
    return [tenant(budget=budget, default_output_tokens=4)]


def spent(rig: Rig) -> int:
    (account,) = (account for key, account in rig.storage._accounts.items() if "budget" in key)
    return account.spent


async def stream_tokens(reply: ScriptedResponse, client: Client, times: int) -> int:
    """Send token after token, and let the storage operations run in between. Returns how many the client got."""
    for _ in range(times):
        reply.say(delta("four"))
        await settle()
        if client.whole:
            break
    return client.content.count(b'"content"')


async def test_a_stream_ends_with_an_error_when_the_budget_is_spent(tmp_path: Path) -> None:
    async with a_rig(tmp_path, tenants=small_budget()) as rig:
        client = Client(STREAM)
        serving = rig.begin(client)
        reply = await rig.reply()
        got = await stream_tokens(reply, client, 100)
        await in_time(serving)
        assert 10 < got < 20
        assert client.whole
        assert DONE not in client.content
        error = json.loads(client.content.removesuffix(b"\n\n").rpartition(b"data: ")[2])["error"]
        assert error["code"] == "insufficient_quota"
        assert error["message"] == "tenant t may spend 0.00004 in total; the budget is spent, so the answer ends here"
        assert reply.closed == 1  # the deployment stops generating
        (receipt,) = rig.receipts()
        assert receipt["outcome"] == Outcome.BUDGET_SPENT.value
        assert receipt["output"] == got + 1
        await rig.components.settler.stop()
        await rig.components.limiter.retry_unsettled()
        assert BUDGET_NANOS - TOKEN_NANOS < spent(rig) <= BUDGET_NANOS + 2 * TOKEN_NANOS
        assert (await rig.ask(STREAM)).json["error"]["code"] == "insufficient_quota"


async def test_a_stream_within_the_budget_is_complete_and_returns_what_it_did_not_use(tmp_path: Path) -> None:
    async with a_rig(tmp_path, tenants=small_budget()) as rig:
        client = Client(STREAM)
        serving = rig.begin(client)
        reply = await rig.reply()
        assert await stream_tokens(reply, client, 10) == 10
        reply.say(usage_frame(5, 10), DONE)
        await in_time(serving)
        assert client.content.endswith(DONE)
        await rig.components.settler.stop()
        await rig.components.limiter.retry_unsettled()
        (account,) = (account for key, account in rig.storage._accounts.items() if "budget" in key)
        assert (account.spent, account.held) == (5 * 1000 + 10 * TOKEN_NANOS, 0)


async def test_a_stream_is_not_cut_unless_the_policy_says_so(tmp_path: Path) -> None:
    models = [{"name": "m", "deployments": ["a", "b"], "max_output_tokens": 1}]  # less than it generates here
    async with a_rig(tmp_path, models=models, tenants=small_budget(cut_streams=False)) as rig:
        client = Client(STREAM)
        serving = rig.begin(client)
        reply = await rig.reply()
        assert await stream_tokens(reply, client, 30) == 30
        reply.say(DONE)
        await in_time(serving)
        assert client.content.endswith(DONE)
        assert len(rig.storage.granted) == 1  # it reserves nothing more


async def test_a_stream_with_max_tokens_reserves_nothing_more(tmp_path: Path) -> None:
    async with a_rig(tmp_path, tenants=small_budget()) as rig:
        client = Client(chat(stream=True, max_tokens=12))
        serving = rig.begin(client)
        reply = await rig.reply()
        assert await stream_tokens(reply, client, 12) == 12
        reply.say(DONE)
        await in_time(serving)
        assert len(rig.storage.granted) == 1


async def test_a_stream_is_not_cut_while_the_storage_is_unreachable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with a_rig(tmp_path, tenants=small_budget()) as rig:
        client = Client(STREAM)
        serving = rig.begin(client)
        reply = await rig.reply()

        async def fail(*_: object, **__: object) -> None:
            raise StorageUnavailable("timed out")

        with monkeypatch.context() as patch:
            patch.setattr(rig.storage, "reserve", fail)
            assert await stream_tokens(reply, client, 30) == 30
        reply.say(DONE)
        await in_time(serving)
        assert client.content.endswith(DONE)
        assert rig.components.limiter.storage_failures == 1  # it is retried after a while, not at each chunk


async def test_a_client_that_disconnects_during_a_reservation_holds_nothing(tmp_path: Path) -> None:
    async with a_rig(tmp_path, tenants=small_budget()) as rig:
        client = Client(STREAM)
        serving = rig.begin(client)
        reply = await rig.reply()
        for _ in range(6):
            reply.say(delta("x"))
        client.leave()
        await in_time(serving)
        await rig.components.settler.stop()
        await rig.components.limiter.retry_unsettled()
        (account,) = (account for key, account in rig.storage._accounts.items() if "budget" in key)
        assert account.held == 0
