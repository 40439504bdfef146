"""Calls wait for a slot on the event loop: order, timeouts, cancellation, shedding, held calls and reloads."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from gateway.core.errors import Overloaded
from gateway.deployments.fleet import Fleet
from gateway.deployments.slot_permit import SlotPermit
from gateway.policy import Policy
from gateway.prefix import working_set
from gateway.providers.offline import OfflineProvider
from gateway.queueing import Queue
from gateway.types import Call
from tests.gateway.calls import a_call, a_policy, chat


def a_queue(policy: Policy) -> tuple[Queue, Fleet]:
    fleet = Fleet(lambda deployment: OfflineProvider())
    queue = Queue(fleet)
    fleet.apply(policy)
    return queue, fleet


def one_slot(**realtime: object) -> Policy:
    return a_policy(
        deployments=[{"name": "a", "base_url": "http://a.invalid/v1", "model": "served", "max_concurrency": 1}],
        models=[{"name": "m", "deployments": ["a"]}],
        classes={"realtime": realtime},
        rules=[{"match": {"service_tier": "flex"}, "class": "batch"}],
    )


def call_now(policy: Policy, **fields: object) -> Call:
    return a_call(chat(**fields), policy, now=asyncio.get_running_loop().time())


async def settle() -> None:
    """Let every task that can run do so."""
    for _ in range(10):
        await asyncio.sleep(0)


async def hold(queue: Queue, call: Call, order: list[str], name: str, leave: asyncio.Event) -> None:
    with await queue.acquire_slot(call):
        order.append(name)
        await leave.wait()


async def test_a_free_slot_is_taken_without_queueing_and_released() -> None:
    policy = a_policy()
    queue, fleet = a_queue(policy)
    with await queue.acquire_slot(call_now(policy)):
        assert sum(deployment.slots_taken for deployment in fleet) == 1
    assert sum(deployment.slots_taken for deployment in fleet) == 0


async def test_slots_are_taken_at_the_least_busy_deployment() -> None:
    policy = a_policy()
    queue, fleet = a_queue(policy)
    with await queue.acquire_slot(call_now(policy)), await queue.acquire_slot(call_now(policy)):
        assert [deployment.slots_taken for deployment in fleet] == [1, 1]


async def test_realtime_goes_before_batch_that_came_earlier() -> None:
    policy = one_slot()
    queue, fleet = a_queue(policy)
    order: list[str] = []
    leave = asyncio.Event()
    first = asyncio.create_task(hold(queue, call_now(policy), order, "first", leave))
    await settle()
    batch = asyncio.create_task(hold(queue, call_now(policy, service_tier="flex"), order, "batch", leave))
    await settle()
    realtime = asyncio.create_task(hold(queue, call_now(policy), order, "realtime", leave))
    await settle()
    assert (queue.depth("batch"), queue.depth("realtime")) == (1, 1)
    soon = asyncio.get_running_loop().time() + 5
    oldest = queue.scheduler.oldest_seconds
    assert oldest("batch", soon) > oldest("realtime", soon) >= 5, "as they arrived"
    leave.set()
    await asyncio.gather(first, batch, realtime)
    assert order == ["first", "realtime", "batch"]
    assert oldest("batch", soon) == 0
    assert [deployment.slots_taken for deployment in fleet] == [0]
    assert queue.depth("batch") == queue.depth("realtime") == 0


async def test_a_queued_call_goes_before_one_that_arrives_when_the_slot_is_released() -> None:
    """A released slot is granted to the queued call, not to one that arrives at the same moment."""
    policy = one_slot()
    queue, _ = a_queue(policy)
    order: list[str] = []
    leave_first, leave = asyncio.Event(), asyncio.Event()
    leave.set()
    first = asyncio.create_task(hold(queue, call_now(policy), order, "first", leave_first))
    await settle()
    waiting = asyncio.create_task(hold(queue, call_now(policy), order, "waiting", leave))
    await settle()
    leave_first.set()
    late = asyncio.create_task(hold(queue, call_now(policy), order, "late", leave))
    await asyncio.gather(first, waiting, late)
    assert order == ["first", "waiting", "late"]


async def test_a_full_queue_rejects_with_a_retry_after_header() -> None:
    policy = one_slot(max_queue=0)
    queue, fleet = a_queue(policy)
    full = pytest.raises(Overloaded, match="0 realtime calls are already queued")
    with await queue.acquire_slot(call_now(policy)), full as rejection:
        await queue.acquire_slot(call_now(policy))
    assert rejection.value.status == 503
    assert int(rejection.value.headers["retry-after"]) >= 1
    assert [deployment.slots_taken for deployment in fleet] == [0]


async def test_a_wait_times_out_after_max_wait() -> None:
    policy = one_slot(max_wait="20ms")
    queue, fleet = a_queue(policy)
    with await queue.acquire_slot(call_now(policy)):
        with pytest.raises(Overloaded, match=r"within 0\.02 s"):
            await queue.acquire_slot(call_now(policy))
        assert queue.depth("realtime") == 0
    assert [deployment.slots_taken for deployment in fleet] == [0]


async def test_after_a_timeout_later_calls_wait_less_until_the_queue_is_empty() -> None:
    policy = one_slot(max_wait="400ms")
    queue, _ = a_queue(policy)

    async def time_out(call: Call) -> str:
        with pytest.raises(Overloaded) as rejection:
            await queue.acquire_slot(call)
        return rejection.value.message.rpartition("within ")[2]

    with await queue.acquire_slot(call_now(policy)):
        patient = asyncio.create_task(time_out(call_now(policy)))
        batch = asyncio.create_task(time_out(call_now(policy, service_tier="flex")))
        await asyncio.sleep(0.2)
        behind = asyncio.create_task(
            time_out(call_now(policy))
        )  # keeps the queue from being empty when the first one times out
        assert await patient == "0.4 s"
        assert await time_out(call_now(policy)) == "0.1 s"
        assert await behind == "0.4 s"
        assert await time_out(call_now(policy)) == "0.4 s"  # the queue was empty before it
        batch.cancel()
        await asyncio.wait([batch])


async def test_a_queued_call_is_shed_for_a_tenant_with_fewer_calls() -> None:
    policy = one_slot(max_queue=2)
    queue, fleet = a_queue(policy)
    order: list[str] = []
    leave = asyncio.Event()
    first = asyncio.create_task(hold(queue, call_now(policy), order, "first", leave))
    await settle()
    many = [asyncio.create_task(hold(queue, call_now(policy), order, f"t{n}", leave)) for n in range(2)]
    await settle()
    other = a_call(chat(), policy, tenant="u", now=asyncio.get_running_loop().time())
    alone = asyncio.create_task(hold(queue, other, order, "u", leave))
    await settle()
    with pytest.raises(Overloaded, match="2 realtime calls are already queued") as rejection:
        await many[1]
    assert rejection.value.status == 503 and int(rejection.value.headers["retry-after"]) >= 1
    leave.set()
    await asyncio.gather(first, many[0], alone)
    assert sorted(order) == ["first", "t0", "u"] and queue.scheduler.shed["realtime"] == 1
    assert [deployment.slots_taken for deployment in fleet] == [0]


async def test_a_call_waits_no_longer_than_its_client() -> None:
    policy = one_slot(max_wait="60s")
    queue, _ = a_queue(policy)
    now = asyncio.get_running_loop().time()
    impatient = a_call(chat(stream=True), policy, headers={b"x-stainless-read-timeout": b"0.02"}, now=now)
    with await queue.acquire_slot(call_now(policy)), pytest.raises(Overloaded, match=r"within 0\.02 s"):
        await queue.acquire_slot(impatient)


async def test_a_cancelled_call_is_removed_from_the_queue() -> None:
    policy = one_slot()
    queue, fleet = a_queue(policy)
    with await queue.acquire_slot(call_now(policy)):
        waiting = asyncio.create_task(hold(queue, call_now(policy), [], "", asyncio.Event()))
        await settle()
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        assert queue.depth("realtime") == 0
    assert [deployment.slots_taken for deployment in fleet] == [0]


async def test_a_slot_granted_just_before_cancellation_is_released() -> None:
    policy = one_slot()
    queue, fleet = a_queue(policy)
    permit = fleet.take(list(fleet), 0.0)
    assert permit is not None
    waiting = asyncio.create_task(hold(queue, call_now(policy), [], "", asyncio.Event()))
    await settle()
    permit.release()  # grants it to `waiting`, which has not run since
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    assert [deployment.slots_taken for deployment in fleet] == [0]


async def test_queued_calls_are_rejected_if_a_reload_removes_their_deployments() -> None:
    policy = one_slot()
    queue, fleet = a_queue(policy)
    permit = fleet.take(list(fleet), 0.0)
    assert permit is not None
    waiting = asyncio.create_task(hold(queue, call_now(policy), [], "", asyncio.Event()))
    await settle()
    fleet.apply(a_policy(deployments=[{"name": "z", "base_url": "http://z.invalid", "model": "served"}],
                         models=[{"name": "m", "deployments": ["z"]}]))  # fmt: skip
    with pytest.raises(Overloaded, match="no deployment any more"):
        await waiting
    with pytest.raises(Overloaded, match="no deployment any more"):
        await queue.acquire_slot(call_now(policy))
    permit.release()


async def test_a_queued_call_gets_a_slot_at_a_deployment_that_a_reload_adds() -> None:
    policy = one_slot()
    queue, fleet = a_queue(policy)
    permit, leave = fleet.take(list(fleet), 0.0), asyncio.Event()
    assert permit is not None
    order: list[str] = []
    waiting = asyncio.create_task(hold(queue, call_now(policy), order, "moved", leave))
    await settle()
    moved = policy.model_dump(by_alias=True)
    moved["deployments"][0]["base_url"] = "http://moved.invalid/v1"
    fleet.apply(Policy.model_validate(moved))
    await settle()
    assert order == ["moved"]
    leave.set()
    await waiting
    permit.release()


async def test_closing_rejects_queued_and_new_calls() -> None:
    policy = one_slot()
    queue, _ = a_queue(policy)
    leave = asyncio.Event()
    first = asyncio.create_task(hold(queue, call_now(policy), [], "", leave))
    await settle()
    waiting = asyncio.create_task(hold(queue, call_now(policy), [], "", leave))
    await settle()
    queue.close()
    with pytest.raises(Overloaded, match="shutting down"):
        await waiting
    with pytest.raises(Overloaded, match="shutting down"):
        await queue.acquire_slot(call_now(policy))
    leave.set()
    await first


async def test_a_permit_moves_only_to_a_deployment_with_a_free_slot() -> None:
    policy = a_policy()
    _, fleet = a_queue(policy)
    a, b = fleet
    full = [SlotPermit(fleet, b), SlotPermit(fleet, b)]
    permit = SlotPermit(fleet, a)
    assert not permit.move_to(b)
    assert (a.slots_taken, b.slots_taken) == (1, 2)
    full[0].release()
    assert permit.move_to(b)
    assert (a.slots_taken, b.slots_taken) == (0, 2)
    permit.release()
    permit.release()
    assert (a.slots_taken, b.slots_taken) == (0, 1)


async def test_a_reload_keeps_the_state_of_unchanged_deployments() -> None:
    policy = a_policy()
    queue, fleet = a_queue(policy)
    a, b = fleet
    a.cache.add([1, 2, 3])
    with await queue.acquire_slot(call_now(policy)):
        moved = policy.model_dump(by_alias=True)
        moved["deployments"][1]["base_url"] = "http://moved.invalid/v1"
        moved["deployments"][0]["max_concurrency"] = 9
        fleet.apply(Policy.model_validate(moved))
        after = {deployment.name: deployment for deployment in fleet}
        assert after["a"] is a
        assert after["a"].cache.match([1, 2, 3]) == 3
        assert after["a"].config.max_concurrency == 9
        assert after["b"] is not b


PROMPT = "All the world is a stage, and all the men and women merely players. " * 20


def small_caches(**realtime: object) -> Policy:
    """Two deployments whose caches hold one prompt of some 380 tokens, but not two."""
    return a_policy(
        deployments=[
            {"name": name, "base_url": f"http://{name}.invalid/v1", "model": "served", "cache_tokens": 600}
            for name in ("a", "b")
        ],
        classes={"realtime": realtime},
        rules=[{"match": {"service_tier": "flex"}, "class": "batch"}],
    )


def converse(fleet: Fleet, policy: Policy, text: str, now: float, **body: str) -> None:
    """Send two turns of a conversation to the deployment whose cache has room for it."""
    for turn in (text, text + " And then?"):
        call = call_now(policy, messages=[{"role": "user", "content": turn}], **body)
        homes = [deployment.estimate for deployment in fleet]
        assert fleet.working_set.admit(call, homes, now)
        known = fleet.working_set.find(call, homes)
        assert known is not None
        next(deployment for deployment in fleet if deployment.estimate is known.home).send(call, now).end(now)


async def test_a_conversation_that_does_not_fit_the_caches_is_held_although_slots_are_free(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    policy = small_caches()
    queue, fleet = a_queue(policy)
    now = asyncio.get_running_loop().time()
    converse(fleet, policy, "One. " + PROMPT, now, service_tier="flex")
    converse(fleet, policy, "Two. " + PROMPT, now, service_tier="flex")
    monkeypatch.setattr("gateway.queueing.queue.HELD_RECHECK_SECONDS", 0.001)
    third = call_now(policy, messages=[{"role": "user", "content": "Three. " + PROMPT}], service_tier="flex")
    leave, order = asyncio.Event(), list[str]()
    leave.set()
    waiting = asyncio.create_task(hold(queue, third, order, "third", leave))
    await settle()
    assert queue.depth("batch") == 1
    continuing = call_now(
        policy, messages=[{"role": "user", "content": "Two. " + PROMPT + " And then? Really?"}], service_tier="flex"
    )
    await hold(queue, continuing, order, "continuing", leave)
    realtime = call_now(policy, messages=[{"role": "user", "content": "Four. " + PROMPT}])
    await hold(queue, realtime, order, "realtime", leave)
    assert order == ["continuing", "realtime"]
    monkeypatch.setattr(working_set, "IDLE_SECONDS", 0.0)  # the other conversations have ended
    await asyncio.wait_for(waiting, 5.0)
    assert order[-1] == "third" and not any(deployment.slots_taken for deployment in fleet)


async def test_a_real_time_call_is_held_for_a_bounded_time_and_others_overtake_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    policy = small_caches(hold="auto")
    queue, fleet = a_queue(policy)
    monkeypatch.setattr(fleet.working_set, "_is_holding", lambda homes, now, *, urgent: True)
    now = asyncio.get_running_loop().time()
    fleet.working_set.tracked_until = now + 60
    converse(fleet, policy, "One. " + PROMPT, now)
    converse(fleet, policy, "Two. " + PROMPT, now)
    third = call_now(policy, messages=[{"role": "user", "content": "Three. " + PROMPT}])
    leave, order = asyncio.Event(), list[str]()
    leave.set()
    waiting = asyncio.create_task(hold(queue, third, order, "third", leave))
    await settle()
    assert queue.depth("realtime") == 1
    continuing = call_now(policy, messages=[{"role": "user", "content": "Two. " + PROMPT + " And then? Really?"}])
    await hold(queue, continuing, order, "continuing", leave)
    assert order == ["continuing"]
    assert third.latency_class.hold_max is not None
    later = now + third.latency_class.hold_max
    queue.scheduler.grant_free_slots(later - 0.1)
    assert queue.depth("realtime") == 1 and queue.scheduler.next_hold_end < later + 1
    queue.scheduler.grant_free_slots(later + 1)
    await asyncio.wait_for(waiting, 5.0)
    assert order[-1] == "third" and not any(deployment.slots_taken for deployment in fleet)


async def test_a_call_is_held_for_at_most_half_of_the_time_that_it_may_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = small_caches(hold="auto")
    queue, fleet = a_queue(policy)
    monkeypatch.setattr(fleet.working_set, "_is_holding", lambda homes, now, *, urgent: True)
    now = asyncio.get_running_loop().time()
    fleet.working_set.tracked_until = now + 60
    converse(fleet, policy, "One. " + PROMPT, now)
    converse(fleet, policy, "Two. " + PROMPT, now)
    third = call_now(policy, messages=[{"role": "user", "content": "Three. " + PROMPT}])
    leave, order = asyncio.Event(), list[str]()
    leave.set()
    impatient = msgspec.structs.replace(third, read_timeout_seconds=4.0)
    waiting = asyncio.create_task(hold(queue, impatient, order, "impatient", leave))
    await settle()
    assert queue.depth("realtime") == 1 and queue.scheduler.next_hold_end - now < 3.0
    queue.scheduler.grant_free_slots(queue.scheduler.next_hold_end)
    await asyncio.wait_for(waiting, 5.0)
    assert order == ["impatient"]


async def test_batch_prompts_with_a_common_prefix_are_served_together() -> None:
    policy = one_slot()
    queue, _ = a_queue(policy)
    leave, order = asyncio.Event(), list[str]()
    first = asyncio.create_task(hold(queue, call_now(policy), order, "first", leave))
    await settle()
    tasks = []
    for number in range(6):
        text = ("Even. " if number % 2 == 0 else "Odd. ") + PROMPT * 4 + str(number)
        call = call_now(policy, messages=[{"role": "user", "content": text}], service_tier="flex")
        tasks.append(asyncio.create_task(hold(queue, call, order, "even" if number % 2 == 0 else "odd", leave)))
        await settle()
    leave.set()
    await asyncio.gather(first, *tasks)
    assert order == ["first", "even", "even", "even", "odd", "odd", "odd"]
