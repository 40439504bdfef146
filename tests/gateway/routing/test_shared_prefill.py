from __future__ import annotations

import asyncio

from gateway.deployments.fleet import DeploymentState
from gateway.routing.shared_prefill import wait_for_shared_prefill
from gateway.types import Call
from tests.gateway.calls import a_call, chat
from tests.gateway.routing.test_strategies import servers

LONG = "All the world is a stage, and all the men and women merely players. " * 200


def a_burst() -> tuple[DeploymentState, Call, Call]:
    a, _ = servers()
    return a, a_call(chat(LONG + "one")), a_call(chat(LONG + "two"))


def now() -> float:
    return asyncio.get_running_loop().time()


async def follows(call: Call, server: DeploymentState, deadline_seconds: float = 60.0) -> asyncio.Task[None]:
    task = asyncio.create_task(wait_for_shared_prefill(call, server, now() + deadline_seconds))
    for _ in range(5):
        await asyncio.sleep(0)
    return task


async def test_a_follower_waits_for_the_first_chunk_of_its_leader() -> None:
    server, leader, follower = a_burst()
    sent = server.send(leader, now())
    waiting = await follows(follower, server)
    assert not waiting.done()
    sent.first_chunk(now())
    await asyncio.wait_for(waiting, 1.0)


async def test_a_leader_that_fails_keeps_nobody_waiting() -> None:
    server, leader, follower = a_burst()
    sent = server.send(leader, now())
    waiting = await follows(follower, server)
    sent.end(now(), answered=False)
    await asyncio.wait_for(waiting, 1.0)


async def test_nobody_waits_for_what_is_warm_or_shared_by_nobody() -> None:
    server, leader, follower = a_burst()
    assert (await follows(follower, server)).done(), "nothing is being computed"
    server.send(leader, now())
    assert (await follows(a_call(chat("Another prompt. " * 500)), server)).done()
    first, again = a_burst()[0], leader
    first.send(leader, now()).first_chunk(now())
    first.send(again, now())
    assert (await follows(follower, first)).done(), "only the rest of its leader is computed"


async def test_the_wait_ends_at_the_deadline() -> None:
    server, leader, follower = a_burst()
    server.send(leader, now())
    assert (await follows(follower, server, deadline_seconds=0.0)).done()
