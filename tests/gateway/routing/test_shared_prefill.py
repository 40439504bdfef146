"""Waiting for a prefix that another call is computing."""

from __future__ import annotations

import asyncio

from gateway.deployments.state import DeploymentState
from gateway.routing.prefix_affinity import PrefixAffinity
from gateway.routing.shared_prefill import QUEUED_FACTOR_MAX, wait_for_shared_prefill
from gateway.types import Call
from tests.gateway.calls import a_call, chat
from tests.gateway.routing.test_strategies import make_deployments, prompt_of

LONG = "All the world is a stage, and all the men and women merely players. " * 200


def two_calls_of_a_burst() -> tuple[DeploymentState, Call, Call]:
    a, _ = make_deployments()
    return a, a_call(chat(LONG + "one")), a_call(chat(LONG + "two"))


def now() -> float:
    return asyncio.get_running_loop().time()


async def start_waiting(call: Call, deployment: DeploymentState, deadline_seconds: float = 60.0) -> asyncio.Task[None]:
    task = asyncio.create_task(wait_for_shared_prefill(call, deployment, now() + deadline_seconds))
    for _ in range(5):
        await asyncio.sleep(0)
    return task


async def test_a_call_waits_for_the_first_chunk_of_a_shared_prefill() -> None:
    deployment, leader, follower = two_calls_of_a_burst()
    sent = deployment.send(leader, now())
    waiting = await start_waiting(follower, deployment)
    assert not waiting.done()
    sent.first_chunk(now())
    await asyncio.wait_for(waiting, 1.0)


async def test_a_failed_prefill_ends_the_wait() -> None:
    deployment, leader, follower = two_calls_of_a_burst()
    sent = deployment.send(leader, now())
    waiting = await start_waiting(follower, deployment)
    sent.end(now(), answered=False)
    await asyncio.wait_for(waiting, 1.0)


async def test_no_call_waits_for_a_cached_or_unshared_prefix() -> None:
    deployment, leader, follower = two_calls_of_a_burst()
    assert (await start_waiting(follower, deployment)).done(), "nothing is being computed"
    deployment.send(leader, now())
    assert (await start_waiting(a_call(chat("Another prompt. " * 500)), deployment)).done()
    first, again = two_calls_of_a_burst()[0], leader
    first.send(leader, now()).first_chunk(now())
    first.send(again, now())
    assert (await start_waiting(follower, first)).done(), "only the rest of its leader is computed"


async def test_no_call_waits_behind_a_long_queue() -> None:
    """Prompts that are sent meanwhile would be computed before it. In the queue it is right behind its leader."""
    for queued_factor, waits in ((0.5, True), (QUEUED_FACTOR_MAX, False)):
        deployment, leader, follower = two_calls_of_a_burst()
        deployment.send(prompt_of(int(queued_factor * leader.prompt_tokens_estimate)), now())
        sent = deployment.send(leader, now())
        waiting = await start_waiting(follower, deployment)
        assert waiting.done() is not waits
        sent.end(now(), answered=False)
        await asyncio.wait_for(waiting, 1.0)


async def test_the_wait_ends_at_the_deadline() -> None:
    deployment, leader, follower = two_calls_of_a_burst()
    deployment.send(leader, now())
    assert (await start_waiting(follower, deployment, deadline_seconds=0.0)).done()


async def test_other_prompts_avoid_a_deployment_where_calls_wait_for_a_prefix() -> None:
    """They would be computed before these calls. So they go where as much is queued, but no call waits."""
    deployment, leader, follower = two_calls_of_a_burst()
    other = make_deployments()[1]
    sent, prompt = deployment.send(leader, now()), prompt_of(4000)
    other.send(prompt_of(leader.prompt_tokens_estimate + 1000), now())

    def chosen() -> DeploymentState:
        return PrefixAffinity().order(prompt, [deployment, other], now())[0].deployment

    assert chosen() is deployment
    waiting = [await start_waiting(follower, deployment) for _ in range(3)]
    assert chosen() is other
    sent.first_chunk(now())
    await asyncio.wait_for(asyncio.gather(*waiting), 1.0)
    assert deployment.estimate.waiting_for_prefix == 0


async def test_a_call_waits_for_what_it_will_load_from_another_deployment() -> None:
    source, leader, follower = two_calls_of_a_burst()
    _, target = make_deployments()
    sent = source.send(leader, now())
    waiting = asyncio.create_task(wait_for_shared_prefill(follower, target, now() + 60.0, source))
    await asyncio.sleep(0)
    assert (target.estimate.waiting_for_prefix, waiting.done()) == (1, False)
    sent.first_chunk(now())
    await asyncio.wait_for(waiting, 1.0)
    assert target.estimate.waiting_for_prefix == 0
    await asyncio.wait_for(wait_for_shared_prefill(follower, target, now() + 60.0, source), 1.0)
