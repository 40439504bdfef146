"""Streams that cost more than was reserved for them: cut where the policy says so, and only when nothing is left."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gateway.core.errors import StorageUnavailable
from gateway.types import Outcome
from tests.gateway.harness import DONE, Client, Rig, Told, a_rig, chat, delta, in_time, settle, tenant, usage_frame

STREAM = chat(stream=True)
TOKEN_NANOS = 2_000  # at 2 per million
BUDGET_NANOS = 40_000


def poor(*, cut_streams: bool = True) -> list[dict[str, Any]]:
    """Without max_tokens, four tokens are reserved; in all, fewer than twenty can be paid."""
    budget = {"amount": "0.00004", "per": "total", "cut_streams": cut_streams}
    return [tenant(budget=budget, default_output_tokens=4)]


def spent(rig: Rig) -> int:
    (account,) = (account for key, account in rig.storage._accounts.items() if "budget" in key)
    return account.spent


async def say(reply: Told, client: Client, times: int) -> int:
    """Token by token, with time between for the storage; how many the client got."""
    for _ in range(times):
        reply.say(delta("x"))
        await settle()
        if client.whole:
            break
    return client.content.count(b'"content"')


async def test_a_stream_ends_truthfully_when_the_budget_is_spent(tmp_path: Path) -> None:
    async with a_rig(tmp_path, tenants=poor()) as rig:
        client = Client(STREAM)
        serving = rig.begin(client)
        reply = await rig.reply()
        got = await say(reply, client, 100)
        await in_time(serving)
        assert 10 < got < 20
        assert client.whole
        assert DONE not in client.content
        error = json.loads(client.content.removesuffix(b"\n\n").rpartition(b"data: ")[2])["error"]
        assert error["code"] == "insufficient_quota"
        assert error["message"] == ("tenant t may spend 0.00004 in total; all of it is spent, so the answer ends here")
        assert reply.closed == 1  # and the server is not left working
        (receipt,) = rig.receipts()
        assert receipt["outcome"] == Outcome.BUDGET_SPENT.value
        assert receipt["output"] == got + 1
        await rig.components.settler.stop()
        await rig.components.limiter.retry_unsettled()
        assert BUDGET_NANOS - TOKEN_NANOS < spent(rig) <= BUDGET_NANOS + 2 * TOKEN_NANOS
        assert (await rig.ask(STREAM)).json["error"]["code"] == "insufficient_quota"


async def test_what_ends_within_the_budget_is_whole_and_gives_back_what_it_did_not_use(tmp_path: Path) -> None:
    async with a_rig(tmp_path, tenants=poor()) as rig:
        client = Client(STREAM)
        serving = rig.begin(client)
        reply = await rig.reply()
        assert await say(reply, client, 10) == 10
        reply.say(usage_frame(5, 10), DONE)
        await in_time(serving)
        assert client.content.endswith(DONE)
        await rig.components.settler.stop()
        await rig.components.limiter.retry_unsettled()
        (account,) = (account for key, account in rig.storage._accounts.items() if "budget" in key)
        assert (account.spent, account.held) == (5 * 1000 + 10 * TOKEN_NANOS, 0)


async def test_without_the_policys_word_a_stream_goes_on(tmp_path: Path) -> None:
    async with a_rig(tmp_path, tenants=poor(cut_streams=False)) as rig:
        client = Client(STREAM)
        serving = rig.begin(client)
        reply = await rig.reply()
        assert await say(reply, client, 30) == 30
        reply.say(DONE)
        await in_time(serving)
        assert client.content.endswith(DONE)
        assert len(rig.storage.granted) == 1  # and asks the storage for nothing


async def test_a_stream_with_max_tokens_has_reserved_enough(tmp_path: Path) -> None:
    async with a_rig(tmp_path, tenants=poor()) as rig:
        client = Client(chat(stream=True, max_tokens=12))
        serving = rig.begin(client)
        reply = await rig.reply()
        assert await say(reply, client, 12) == 12
        reply.say(DONE)
        await in_time(serving)
        assert len(rig.storage.granted) == 1


async def test_while_the_storage_is_away_a_stream_is_not_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with a_rig(tmp_path, tenants=poor()) as rig:
        client = Client(STREAM)
        serving = rig.begin(client)
        reply = await rig.reply()

        async def away(*_: object, **__: object) -> None:
            raise StorageUnavailable("away")

        with monkeypatch.context() as patch:
            patch.setattr(rig.storage, "reserve", away)
            assert await say(reply, client, 30) == 30
        reply.say(DONE)
        await in_time(serving)
        assert client.content.endswith(DONE)
        assert rig.components.limiter.store_failures == 1  # it is asked again after a while, and not at each chunk


async def test_a_client_that_leaves_while_more_is_asked_for_holds_nothing(tmp_path: Path) -> None:
    async with a_rig(tmp_path, tenants=poor()) as rig:
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
