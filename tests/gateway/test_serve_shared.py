"""Cached answers, and answers shared by equal calls in flight, with real components and scripted deployments."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from gateway.endpoints import wire
from gateway.providers.base import Fault, ProviderFailure
from tests.gateway.harness import (
    DONE,
    Client,
    a_rig,
    answer,
    chat,
    cut,
    delta,
    in_time,
    last_event,
    outcomes,
    settle,
    tenant,
    usage_frame,
)

SURE = chat(temperature=0)
SURE_STREAM = chat(temperature=0, stream=True)


async def test_a_kept_answer_is_given_again_and_costs_nothing(tmp_path: Path) -> None:
    async with a_rig(tmp_path) as rig:
        rig.script(delta("one"), usage_frame(), DONE)
        first, second = await rig.ask(SURE_STREAM), await rig.ask(SURE_STREAM)
        assert first.content == second.content and second.headers["x-warmpath-cache"] == "hit"
        assert [receipt["source"] for receipt in rig.receipts()] == ["engine", "cache"]
        assert rig.receipts()[1]["cost"] == "0" and len(rig.replies) == 1


async def test_followers_get_the_usage_that_they_asked_for(tmp_path: Path) -> None:
    async with a_rig(tmp_path) as rig:
        leader = Client(SURE_STREAM)
        follower = Client(chat(temperature=0, stream=True, stream_options={"include_usage": True}))
        serving = [rig.begin(leader)]
        reply = await rig.reply()
        serving.append(rig.begin(follower))
        reply.say(delta("one"), usage_frame(), DONE)
        await in_time(asyncio.gather(*serving))
        assert leader.content == delta("one") + DONE
        assert follower.content == delta("one") + usage_frame() + DONE
        assert follower.headers["x-warmpath-cache"] == "shared" and len(rig.replies) == 1


async def test_other_stream_options_are_another_request(tmp_path: Path) -> None:
    async with a_rig(tmp_path) as rig:
        rig.script(delta("one"), DONE)
        await rig.ask(SURE_STREAM)
        await rig.ask(chat(temperature=0, stream=True, stream_options={"continuous_usage_stats": True}))
        assert len(rig.replies) == 2


async def test_a_leader_that_is_refused_leaves_nobody_waiting(tmp_path: Path) -> None:
    """Delays the cache read, so that the follower arrives before the rejection."""
    async with a_rig(tmp_path, tenants=[tenant(requests="1/1m")]) as rig:
        rig.script(answer())
        await rig.ask(chat())
        asked, go_on = asyncio.Event(), asyncio.Event()
        get = rig.storage.get

        async def slow_get(key: str) -> bytes | None:
            asked.set()
            await go_on.wait()
            return await get(key)

        rig.storage.get = slow_get  # type: ignore[method-assign]
        leader, follower = Client(SURE), Client(SURE)
        serving = [rig.begin(leader)]
        await in_time(asked.wait())
        serving.append(rig.begin(follower))
        await settle()
        go_on.set()
        await in_time(asyncio.gather(*serving))
        assert (leader.status, follower.status) == (429, 429)


async def test_a_leader_whose_client_leaves_works_on_for_its_followers(tmp_path: Path) -> None:
    async with a_rig(tmp_path) as rig:
        leader, follower = Client(SURE_STREAM), Client(SURE_STREAM)
        serving = [rig.begin(leader)]
        reply = await rig.reply()
        reply.say(delta("one"))
        serving.append(rig.begin(follower))
        await settle()
        leader.leave()
        await settle()
        reply.say(usage_frame(), DONE)
        await in_time(asyncio.gather(*serving))
        assert follower.content == delta("one") + DONE
        led, followed = sorted(rig.receipts(), key=lambda receipt: str(receipt["source"]), reverse=True)
        assert (led["outcome"], led["output"], led["attempts"][0]["outcome"]) == ("client_gone", 2, "ok")
        assert (followed["outcome"], followed["cost"]) == ("complete", "0")


async def test_a_leader_whose_client_takes_nothing_works_on_for_its_followers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire, "STALL_SECONDS", 0.02)
    async with a_rig(tmp_path) as rig:
        leader, follower = Client(SURE_STREAM), Client(SURE_STREAM)
        leader.takes = asyncio.Event()
        serving = [rig.begin(leader)]
        reply = await rig.reply()
        serving.append(rig.begin(follower))
        reply.say(delta("one"), DONE)
        await in_time(asyncio.gather(*serving))
        assert follower.content == delta("one") + DONE


async def test_a_leader_and_its_followers_that_all_leave_end_the_servers_work(tmp_path: Path) -> None:
    async with a_rig(tmp_path) as rig:
        clients = [Client(SURE_STREAM) for _ in range(3)]
        serving = [rig.begin(clients[0])]
        reply = await rig.reply()
        reply.say(delta("one"))
        serving += [rig.begin(client) for client in clients[1:]]
        await settle()
        for client in clients:
            assert not reply.closed
            client.leave()
            await settle()
        assert reply.closed
        await in_time(asyncio.gather(*serving))
        assert outcomes(rig) == ["client_gone"] * 3


async def test_a_leader_that_fails_at_once_lets_its_followers_ask_for_themselves(tmp_path: Path) -> None:
    async with a_rig(tmp_path) as rig:
        leader, follower = Client(SURE_STREAM), Client(SURE_STREAM)
        serving = [rig.begin(leader)]
        reply = await rig.reply()
        serving.append(rig.begin(follower))
        await settle()
        reply.say(ProviderFailure(Fault.REFUSED, "", status=400, body=b"{}"))
        own = await rig.reply(1)
        own.say(delta("one"))
        await settle()
        assert follower.content == delta("one")
        follower.leave()  # and is watched, as every one that asks for itself
        await in_time(asyncio.gather(*serving))
        assert own.closed and outcomes(rig) == ["refused", "client_gone"]


async def test_a_leader_that_is_cut_cuts_its_followers(tmp_path: Path) -> None:
    async with a_rig(tmp_path, classes={"realtime": {"continue_cut_streams": False}}) as rig:
        clients = [Client(SURE_STREAM), Client(SURE_STREAM)]
        serving = [rig.begin(clients[0])]
        reply = await rig.reply()
        serving.append(rig.begin(clients[1]))
        server = next(server for server in rig.servers.values() if server.replies)
        server.record_may_come = asyncio.Event()
        reply.say(delta("one"))
        await settle()
        reply.say(cut())
        await in_time(server.asked_for_records.wait())
        await settle()
        assert serving[1].done() and not serving[0].done()  # who follows does not wait for the leader's bill
        server.record_may_come.set()
        await in_time(asyncio.gather(*serving))
        for client in clients:
            assert DONE not in client.content and last_event(client)["error"]["code"] == "upstream_cut"
        assert outcomes(rig) == ["upstream_cut"] * 2
        rig.script(delta("again"), DONE)
        assert (await rig.ask(SURE_STREAM)).content == delta("again") + DONE  # it was not kept


async def test_an_answer_over_the_limit_is_given_to_who_follows_and_not_kept(tmp_path: Path) -> None:
    async with a_rig(tmp_path, cache={"max_answer_bytes": 10}) as rig:
        clients = [Client(SURE_STREAM), Client(SURE_STREAM)]
        serving = [rig.begin(clients[0])]
        reply = await rig.reply()
        serving.append(rig.begin(clients[1]))
        await settle()
        reply.say(delta("one"), delta("two"), DONE)
        await in_time(asyncio.gather(*serving))
        assert [client.content for client in clients] == [delta("one") + delta("two") + DONE] * 2
        rig.script(DONE)
        await rig.ask(SURE_STREAM)
        assert len(rig.replies) == 2


async def test_nobody_waits_for_a_call_of_another_class(tmp_path: Path) -> None:
    async with a_rig(tmp_path) as rig:
        batch, realtime = Client(chat(temperature=0, service_tier="flex")), Client(SURE)
        serving = [rig.begin(batch)]
        slow = await rig.reply()
        serving.append(rig.begin(realtime))
        await settle()
        assert len(rig.replies) == 2
        next(reply for reply in rig.replies if reply is not slow).say(answer())
        await settle()
        assert realtime.whole and not batch.whole
        slow.say(answer())
        await in_time(asyncio.gather(*serving))


async def test_a_fallbacks_answer_is_not_kept(tmp_path: Path) -> None:
    async with a_rig(tmp_path) as rig:
        for name in ("a", "b"):
            rig.servers[name].script = (cut(),)
        rig.servers["c"].script = (answer("from c"),)
        assert b"from c" in (await rig.ask(SURE)).content
        for name in ("a", "b"):
            rig.servers[name].script = (answer("from itself"),)
        for server in rig.fleet:
            server.breaker.succeeded(asyncio.get_running_loop().time())
        assert b"from itself" in (await rig.ask(SURE)).content


async def test_what_the_store_makes_up_is_no_answer(tmp_path: Path) -> None:
    async with a_rig(tmp_path) as rig:
        rig.script(answer())

        async def noise(key: str) -> bytes:
            return b"\xc1 noise"

        rig.storage.get = noise  # type: ignore[method-assign]
        assert (await rig.ask(SURE)).content == answer()
