from __future__ import annotations

import asyncio

import pytest

from gateway.core.errors import Overloaded
from gateway.deployments.fleet import Fleet, SlotPermit
from gateway.policy import Policy
from gateway.prefix import working_set
from gateway.providers.base import OfflineProvider
from gateway.queueing import Queue
from gateway.types import Call
from tests.gateway.calls import a_call, a_policy, chat


def a_queue(policy: Policy) -> tuple[Queue, Fleet]:
    fleet = Fleet(lambda deployment: OfflineProvider())
    queue = Queue(fleet)
    fleet.apply(policy)
    return queue, fleet


def one_place(**realtime: object) -> Policy:
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
    with await queue.turn(call):
        order.append(name)
        await leave.wait()


async def test_a_free_place_is_taken_at_once_and_given_back() -> None:
    policy = a_policy()
    queue, fleet = a_queue(policy)
    with await queue.turn(call_now(policy)):
        assert sum(server.slots_taken for server in fleet) == 1
    assert sum(server.slots_taken for server in fleet) == 0


async def test_places_are_spread_over_the_least_busy_servers() -> None:
    policy = a_policy()
    queue, fleet = a_queue(policy)
    with await queue.turn(call_now(policy)), await queue.turn(call_now(policy)):
        assert [server.slots_taken for server in fleet] == [1, 1]


async def test_realtime_goes_before_batch_that_came_earlier() -> None:
    policy = one_place()
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
    leave.set()
    await asyncio.gather(first, batch, realtime)
    assert order == ["first", "realtime", "batch"]
    assert [server.slots_taken for server in fleet] == [0]
    assert queue.depth("batch") == queue.depth("realtime") == 0


async def test_nobody_jumps_the_line() -> None:
    """A place that comes free goes to who waits, not to who comes in that moment."""
    policy = one_place()
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


async def test_a_full_queue_refuses_with_a_time_to_come_back() -> None:
    policy = one_place(max_queue=0)
    queue, fleet = a_queue(policy)
    full = pytest.raises(Overloaded, match="0 realtime calls already wait")
    with await queue.turn(call_now(policy)), full as refusal:
        await queue.turn(call_now(policy))
    assert refusal.value.status == 503
    assert int(refusal.value.headers["retry-after"]) >= 1
    assert [server.slots_taken for server in fleet] == [0]


async def test_a_wait_ends_when_it_has_lasted_too_long() -> None:
    policy = one_place(max_wait="20ms")
    queue, fleet = a_queue(policy)
    with await queue.turn(call_now(policy)):
        with pytest.raises(Overloaded, match=r"within 0\.02 s"):
            await queue.turn(call_now(policy))
        assert queue.depth("realtime") == 0
    assert [server.slots_taken for server in fleet] == [0]


async def test_where_calls_wait_in_vain_later_ones_wait_less_until_nobody_waits() -> None:
    policy = one_place(max_wait="400ms")
    queue, _ = a_queue(policy)

    async def wait_in_vain(call: Call) -> str:
        with pytest.raises(Overloaded) as refused:
            await queue.turn(call)
        return refused.value.message.rpartition("within ")[2]

    with await queue.turn(call_now(policy)):
        patient = asyncio.create_task(wait_in_vain(call_now(policy)))
        batch = asyncio.create_task(wait_in_vain(call_now(policy, service_tier="flex")))
        await asyncio.sleep(0.2)
        behind = asyncio.create_task(wait_in_vain(call_now(policy)))  # so that somebody waits when the first gives up
        assert await patient == "0.4 s"
        assert await wait_in_vain(call_now(policy)) == "0.1 s"
        assert await behind == "0.4 s"
        assert await wait_in_vain(call_now(policy)) == "0.4 s"  # nobody waited any more
        batch.cancel()
        await asyncio.wait([batch])


async def test_who_waits_may_be_refused_for_a_tenant_that_has_fewer() -> None:
    policy = one_place(max_queue=2)
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
    with pytest.raises(Overloaded, match="2 realtime calls already wait") as refusal:
        await many[1]
    assert refusal.value.status == 503 and int(refusal.value.headers["retry-after"]) >= 1
    leave.set()
    await asyncio.gather(first, many[0], alone)
    assert sorted(order) == ["first", "t0", "u"] and queue.gave_way("realtime") == 1
    assert [server.slots_taken for server in fleet] == [0]


async def test_nobody_waits_longer_than_the_client_does() -> None:
    policy = one_place(max_wait="60s")
    queue, _ = a_queue(policy)
    now = asyncio.get_running_loop().time()
    hurried = a_call(chat(stream=True), policy, headers={b"x-stainless-read-timeout": b"0.02"}, now=now)
    with await queue.turn(call_now(policy)), pytest.raises(Overloaded, match=r"within 0\.02 s"):
        await queue.turn(hurried)


async def test_a_caller_that_leaves_while_waiting_leaves_the_line() -> None:
    policy = one_place()
    queue, fleet = a_queue(policy)
    with await queue.turn(call_now(policy)):
        waiting = asyncio.create_task(hold(queue, call_now(policy), [], "", asyncio.Event()))
        await settle()
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        assert queue.depth("realtime") == 0
    assert [server.slots_taken for server in fleet] == [0]


async def test_a_place_granted_in_the_moment_of_leaving_is_not_lost() -> None:
    policy = one_place()
    queue, fleet = a_queue(policy)
    place = fleet.take(list(fleet), 0.0)
    assert place is not None
    waiting = asyncio.create_task(hold(queue, call_now(policy), [], "", asyncio.Event()))
    await settle()
    place.release()  # grants it to `waiting`, which has not run since
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    assert [server.slots_taken for server in fleet] == [0]


async def test_a_model_that_lost_its_servers_keeps_nobody_waiting() -> None:
    policy = one_place()
    queue, fleet = a_queue(policy)
    place = fleet.take(list(fleet), 0.0)
    assert place is not None
    waiting = asyncio.create_task(hold(queue, call_now(policy), [], "", asyncio.Event()))
    await settle()
    fleet.apply(a_policy(deployments=[{"name": "z", "base_url": "http://z.invalid", "model": "served"}],
                         models=[{"name": "m", "deployments": ["z"]}]))  # fmt: skip
    with pytest.raises(Overloaded, match="no deployment any more"):
        await waiting
    with pytest.raises(Overloaded, match="no deployment any more"):
        await queue.turn(call_now(policy))
    place.release()


async def test_who_waits_takes_a_server_that_a_reload_brought() -> None:
    policy = one_place()
    queue, fleet = a_queue(policy)
    place, leave = fleet.take(list(fleet), 0.0), asyncio.Event()
    assert place is not None
    order: list[str] = []
    waiting = asyncio.create_task(hold(queue, call_now(policy), order, "moved", leave))
    await settle()
    moved = policy.model_dump(by_alias=True)
    moved["deployments"][0]["base_url"] = "http://elsewhere.invalid/v1"
    fleet.apply(Policy.model_validate(moved))
    await settle()
    assert order == ["moved"]
    leave.set()
    await waiting
    place.release()


async def test_closing_refuses_who_waits_and_who_comes() -> None:
    policy = one_place()
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
        await queue.turn(call_now(policy))
    leave.set()
    await first


async def test_a_place_moves_only_where_there_is_room() -> None:
    policy = a_policy()
    _, fleet = a_queue(policy)
    a, b = fleet
    full = [SlotPermit(fleet, b), SlotPermit(fleet, b)]
    place = SlotPermit(fleet, a)
    assert not place.move_to(b)
    assert (a.slots_taken, b.slots_taken) == (1, 2)
    full[0].release()
    assert place.move_to(b)
    assert (a.slots_taken, b.slots_taken) == (0, 2)
    place.release()
    place.release()
    assert (a.slots_taken, b.slots_taken) == (0, 1)


async def test_a_reload_keeps_what_is_known_of_servers_that_stay() -> None:
    policy = a_policy()
    queue, fleet = a_queue(policy)
    a, b = fleet
    a.cache.add([1, 2, 3])
    with await queue.turn(call_now(policy)):
        moved = policy.model_dump(by_alias=True)
        moved["deployments"][1]["base_url"] = "http://elsewhere.invalid/v1"
        moved["deployments"][0]["max_concurrency"] = 9
        fleet.apply(Policy.model_validate(moved))
        after = {server.name: server for server in fleet}
        assert after["a"] is a
        assert after["a"].cache.match([1, 2, 3]) == 3
        assert after["a"].config.max_concurrency == 9
        assert after["b"] is not b


PROMPT = "All the world is a stage, and all the men and women merely players. " * 20


def small_caches() -> Policy:
    """Two servers whose caches hold a prompt of some 380 tokens once, and not twice."""
    return a_policy(
        deployments=[
            {"name": name, "base_url": f"http://{name}.invalid/v1", "model": "served", "cache_tokens": 600}
            for name in ("a", "b")
        ],
        rules=[{"match": {"service_tier": "flex"}, "class": "batch"}],
    )


def converse(fleet: Fleet, policy: Policy, text: str, now: float) -> None:
    """Two turns of a conversation, on the server where there is room for it."""
    for turn in (text, text + " And then?"):
        call = call_now(policy, messages=[{"role": "user", "content": turn}], service_tier="flex")
        homes = [server.estimate for server in fleet]
        assert fleet.working_set.admit(call, homes, now)
        known = fleet.working_set.of(call, homes)
        assert known is not None
        next(server for server in fleet if server.estimate is known.home).send(call, now).end(now)


async def test_a_conversation_that_does_not_fit_waits_although_there_are_places(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    policy = small_caches()
    queue, fleet = a_queue(policy)
    now = asyncio.get_running_loop().time()
    converse(fleet, policy, "One. " + PROMPT, now)
    converse(fleet, policy, "Two. " + PROMPT, now)
    monkeypatch.setattr("gateway.queueing.queue.HELD_LOOK_SECONDS", 0.001)
    third = call_now(policy, messages=[{"role": "user", "content": "Three. " + PROMPT}], service_tier="flex")
    leave, order = asyncio.Event(), list[str]()
    leave.set()
    waiting = asyncio.create_task(hold(queue, third, order, "third", leave))
    await settle()
    assert queue.depth("batch") == 1
    going_on = call_now(
        policy, messages=[{"role": "user", "content": "Two. " + PROMPT + " And then? Really?"}], service_tier="flex"
    )
    await hold(queue, going_on, order, "going on", leave)
    realtime = call_now(policy, messages=[{"role": "user", "content": "Four. " + PROMPT}])
    await hold(queue, realtime, order, "realtime", leave)
    assert order == ["going on", "realtime"]
    monkeypatch.setattr(working_set, "IDLE_SECONDS", 0.0)  # the others have ended
    await asyncio.wait_for(waiting, 5.0)
    assert order[-1] == "third" and not any(server.slots_taken for server in fleet)


async def test_batch_prompts_that_begin_alike_go_one_after_the_other() -> None:
    policy = one_place()
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
