"""What the router does before it gives up: other servers, the same again, a second one at once; each within a bound."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import pytest

from gateway.breaker import Breaker
from gateway.errors import (
    GatewayError,
    Overloaded,
    PoisonousRequest,
    UpstreamBusy,
    UpstreamCut,
    UpstreamError,
    UpstreamTimeout,
)
from gateway.fleet import Server
from gateway.providers.base import Fault, ProviderFailure, Reply
from gateway.routing.hedging import SAMPLES_MIN
from gateway.routing.retries import POT_MAX_RETRIES, RetryBudget, backoff_seconds
from gateway.types import Call
from tests.gateway.calls import a_call, a_policy, chat
from tests.gateway.routing.test_router import Rig, Script, status

TEXT = b'data: {"choices":[{"delta":{"content":"hi"}}]}\n\n'
ROLE = b'data: {"choices":[{"delta":{"role":"assistant","content":""}}]}\n\n'
DONE = b"data: [DONE]\n\n"


class Turns(Script):
    """Answers one script after the other; the last one for ever."""

    def __init__(self, *turns: Script) -> None:
        super().__init__()
        self.turns = list(turns)

    async def open(self, call: Call, *, headers: Mapping[str, str]) -> Reply:
        self.opened += 1
        turn = self.turns.pop(0) if len(self.turns) > 1 else self.turns[0]
        return await turn.open(call, headers=headers)


def busy(code: int, seconds: float | None) -> ProviderFailure:
    return ProviderFailure(Fault.STATUS, f"status {code}", status=code, retry_after_seconds=seconds)


def one_server(**realtime: object) -> object:
    return a_policy(
        deployments=[{"name": "a", "base_url": "http://a.invalid/v1", "model": "m"}],
        models=[{"name": "m", "deployments": ["a"]}],
        classes={"realtime": realtime},
    )


def two_servers(**realtime: object) -> object:
    return a_policy(
        deployments=[{"name": name, "base_url": f"http://{name}.invalid/v1", "model": "m"} for name in "ab"],
        models=[{"name": "m", "deployments": ["a", "b"]}],
        classes={"realtime": realtime},
    )


def server(rig: Rig, name: str) -> Server:
    return next(server for server in rig.fleet if server.name == name)


async def failing(rig: Rig) -> GatewayError:
    with pytest.raises(GatewayError) as failure:
        await rig.chunks()
    assert rig.idle()
    return failure.value


@pytest.mark.parametrize("first", [status(500), busy(429, 0.01), ProviderFailure(Fault.CONNECT, "reset")])
async def test_the_only_server_is_asked_again_after_a_pause(first: ProviderFailure) -> None:
    rig = Rig(one_server(), a=Turns(Script(opening=first), Script(TEXT)))
    assert await rig.chunks() == [TEXT]
    assert [outcome for _, outcome in rig.outcomes][1:] == ["ok"]
    assert rig.idle()


async def test_a_server_that_names_a_pause_gets_it() -> None:
    rig = Rig(one_server(), a=Turns(Script(opening=busy(429, 0.2)), Script(TEXT)))
    loop = asyncio.get_running_loop()
    began = loop.time()
    await rig.chunks()
    assert loop.time() - began >= 0.2
    assert not server(rig, "a").breaker.open  # that it was busy is no fault


async def test_a_longer_pause_is_the_callers_to_make() -> None:
    rig = Rig(one_server(), a=Script(opening=busy(429, 60.0)))
    error = await failing(rig)
    assert isinstance(error, UpstreamBusy) and error.status == 503
    assert 50 <= int(error.headers["retry-after"]) <= 60
    rig.attempts.done.clear()
    again = await failing(rig)  # nobody is asked meanwhile
    assert isinstance(again, Overloaded) and 50 <= int(again.headers["retry-after"]) <= 60
    assert rig.outcomes == []


async def test_servers_that_fail_on_and_on_are_left_alone_and_the_caller_is_told() -> None:
    script = Script(opening=ProviderFailure(Fault.CONNECT, "refused"))
    rig = Rig(one_server(ttft="2s"), a=script)
    for _ in range(2):
        rig.attempts.done.clear()
        await failing(rig)
    assert server(rig, "a").breaker.open
    opened = script.opened
    server(rig, "a").breaker.eject(asyncio.get_running_loop().time(), 30.0)
    rig.attempts.done.clear()
    error = await failing(rig)
    assert isinstance(error, Overloaded) and int(error.headers["retry-after"]) >= 25
    assert script.opened == opened


async def test_a_spent_retry_budget_ends_the_trying(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(two_servers(retries=0), a=Script(opening=status(500)), b=Script(TEXT))
    monkeypatch.setattr("gateway.routing.retries.POT_REFILL_PER_SECOND", 0.0)
    budget = rig.router._budgets["realtime"] = RetryBudget()
    while budget.take(0.0):
        pass
    error = await failing(rig)
    assert isinstance(error, UpstreamError) and rig.outcomes == [("a", "status_500")]
    assert rig.router.retries_refused > 0


def test_the_budget_is_a_share_of_the_calls() -> None:
    budget = RetryBudget()
    taken = 0
    while budget.take(0.0):
        taken += 1
    assert taken == POT_MAX_RETRIES
    for _ in range(100):
        budget.note_call(0.2)
    for _ in range(20):
        taken -= budget.take(0.0)
    assert POT_MAX_RETRIES - taken in (19, 20)
    assert not budget.take(0.0)


def test_pauses_grow_and_are_spread() -> None:
    pauses = [[backoff_seconds(rounds) for _ in range(20)] for rounds in range(8)]
    assert max(pauses[0]) <= 0.25 and min(pauses[7]) >= 2.0 and max(pauses[7]) <= 4.0
    assert len(set(pauses[3])) > 1


async def test_a_role_alone_commits_to_nothing() -> None:
    rig = Rig(two_servers(), a=Script(ROLE, ProviderFailure(Fault.CUT, "died")), b=Script(ROLE, TEXT, DONE))
    assert await rig.chunks() == [ROLE + TEXT, DONE]
    assert rig.outcomes == [("a", "cut"), ("b", "ok")]


async def test_an_empty_answer_is_an_answer() -> None:
    rig = Rig(two_servers(), a=Script(ROLE, DONE), b=Script())
    assert await rig.chunks() == [ROLE + DONE]


async def test_a_stream_that_begins_too_slowly_is_replaced() -> None:
    floor = {"chunks": 3, "within": "30ms"}
    rig = Rig(two_servers(floor=floor), a=Script(TEXT, asyncio.Event()), b=Script(TEXT, TEXT, TEXT, DONE))
    assert await rig.chunks() == [TEXT, TEXT, TEXT, DONE]
    assert rig.outcomes == [("a", "too_slow"), ("b", "ok")]
    assert not server(rig, "a").breaker.open
    assert rig.idle()


async def test_where_all_are_slow_the_second_ones_slowness_is_borne() -> None:
    slow = asyncio.Event()
    rig = Rig(
        two_servers(floor={"chunks": 3, "within": "30ms"}),
        a=Script(TEXT, asyncio.Event()), b=Script(TEXT, slow, TEXT, TEXT, DONE),
    )  # fmt: skip
    asyncio.get_running_loop().call_later(0.2, slow.set)
    assert await rig.chunks() == [TEXT, TEXT, TEXT, DONE]
    assert rig.outcomes == [("a", "too_slow"), ("b", "ok")]


async def test_a_floor_counts_what_was_said_and_not_how_often_it_was_read() -> None:
    gate = asyncio.Event()
    rig = Rig(two_servers(floor={"chunks": 3, "within": "30ms"}), a=Script(TEXT * 3, gate, DONE), b=Script(TEXT, DONE))
    asyncio.get_running_loop().call_later(0.1, gate.set)
    assert await rig.chunks() == [TEXT * 3, DONE]
    assert rig.outcomes == [("a", "ok")]


async def test_where_nobody_would_be_faster_slowness_is_borne() -> None:
    gate = asyncio.Event()
    asyncio.get_running_loop().call_later(0.05, gate.set)
    rig = Rig(one_server(floor={"chunks": 3, "within": "1ms"}), a=Script(TEXT, gate, TEXT, DONE))
    assert await rig.chunks() == [TEXT, TEXT, DONE]


async def test_a_late_server_loses_to_a_second_one() -> None:
    a, b = Script(asyncio.Event()), Script(TEXT, DONE)
    rig = Rig(two_servers(hedge={"after": "10ms", "budget": 1.0}), a=a, b=b)
    assert await rig.chunks() == [TEXT, DONE]
    assert rig.outcomes == [("a", "hedge_lost"), ("b", "ok")]
    assert (a.closed, b.closed) == (1, 1)
    assert rig.idle()
    assert not server(rig, "a").breaker.cooling(asyncio.get_running_loop().time())


async def test_the_first_may_still_win() -> None:
    late, b = asyncio.Event(), Script(asyncio.Event())
    rig = Rig(two_servers(hedge={"after": "10ms", "budget": 1.0}), a=Script(late, TEXT, DONE), b=b)
    asking = asyncio.create_task(rig.chunks())
    while not b.opened:
        await asyncio.sleep(0.005)
    late.set()
    assert await asking == [TEXT, DONE]
    assert rig.outcomes == [("b", "hedge_lost"), ("a", "ok")]
    assert rig.idle()


async def test_a_hedge_that_fails_leaves_the_first_its_time() -> None:
    late = asyncio.Event()
    asyncio.get_running_loop().call_later(0.05, late.set)
    rig = Rig(
        two_servers(hedge={"after": "10ms", "budget": 1.0}), a=Script(late, TEXT, DONE), b=Script(opening=status(500))
    )
    assert await rig.chunks() == [TEXT, DONE]
    assert rig.outcomes == [("b", "status_500"), ("a", "ok")]
    assert rig.idle()


async def test_without_budget_nobody_is_asked_twice() -> None:
    late = asyncio.Event()
    asyncio.get_running_loop().call_later(0.05, late.set)
    rig = Rig(two_servers(hedge={"after": "10ms", "budget": 0.01}), a=Script(late, TEXT, DONE), b=Script(TEXT))
    rig.router._hedging._pot = 0.0
    assert await rig.chunks() == [TEXT, DONE]
    assert rig.outcomes == [("a", "ok")]


async def test_a_client_that_leaves_a_race_ends_both() -> None:
    a, b = Script(asyncio.Event()), Script(asyncio.Event())
    rig = Rig(two_servers(hedge={"after": "5ms", "budget": 1.0}), a=a, b=b)
    asking = asyncio.create_task(rig.chunks())
    while not b.opened:
        await asyncio.sleep(0.005)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert sorted(rig.outcomes) == [("a", "client_gone"), ("b", "client_gone")]
    assert rig.idle()


async def test_a_client_in_a_hurry_is_answered_in_its_time_and_blames_nobody() -> None:
    policy = two_servers(ttft="60s")
    rig = Rig(policy, a=Script(asyncio.Event()), b=Script(asyncio.Event()))
    now = asyncio.get_running_loop().time()
    call = a_call(chat(stream=True), policy, headers={b"x-stainless-read-timeout": b"0.05"}, now=now)
    with pytest.raises(UpstreamTimeout), await rig.queue.turn(call) as place:
        async with rig.router.open(call, place, rig.attempts):
            pass
    assert rig.outcomes == [("a", "out_of_time")]
    assert not server(rig, "a").breaker.cooling(asyncio.get_running_loop().time())


async def test_late_is_learned() -> None:
    rig = Rig(two_servers(hedge={"after": "p95", "budget": 1.0}), a=Script(TEXT, DONE), b=Script(TEXT, DONE))
    hedge = rig.policy.classes["realtime"].hedge
    assert hedge is not None
    for _ in range(SAMPLES_MIN):
        assert rig.router._hedging.delay_seconds(hedge, "m", True) is None
        await rig.chunks()
        rig.attempts.done.clear()
    learned = rig.router._hedging.delay_seconds(hedge, "m", True)
    assert learned is not None and learned < 1.0


async def test_both_answering_in_one_moment_is_one_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = asyncio.Event()
    a, b = Script(gate, TEXT, DONE), Script(gate, TEXT, DONE)
    rig = Rig(two_servers(hedge={"after": "5ms", "budget": 1.0}), a=a, b=b)
    asking = asyncio.create_task(rig.chunks())
    while not b.opened:
        await asyncio.sleep(0.005)
    gate.set()
    assert await asking == [TEXT, DONE]
    assert sorted(outcome for _, outcome in rig.outcomes) == ["hedge_lost", "ok"]
    assert rig.outcomes[-1][1] == "ok"
    assert (a.closed, b.closed) == (1, 1)
    assert rig.idle()


class Mortal(Script):
    """Dies of what it is asked: the connection is cut, and nobody answers health checks afterwards."""

    dead = False

    async def healthy(self) -> bool:
        return not self.dead

    async def open(self, call: Call, *, headers: Mapping[str, str]) -> Reply:
        self.opened += 1
        if self.dead:
            raise ProviderFailure(Fault.CONNECT, "refused")
        if self.steps:
            await self.steps[0].wait()  # type: ignore[union-attr]
        self.dead = True
        raise ProviderFailure(Fault.CUT, "died")


async def test_a_request_that_a_server_dies_of_is_not_sent_to_another() -> None:
    a, b = Mortal(), Mortal()
    rig = Rig(two_servers(), a=a, b=b)
    for _ in range(2):
        error = await failing(rig)
        assert isinstance(error, PoisonousRequest) and error.status == 422
    assert (a.opened, b.opened) == (1, 0)


async def test_of_several_that_were_there_each_is_asked_once_more() -> None:
    gate = asyncio.Event()
    a = Mortal(gate)
    rig = Rig(two_servers(), a=a, b=Script(TEXT, DONE))
    server(rig, "b").breaker.rest(asyncio.get_running_loop().time(), 0.1)
    asking = [asyncio.create_task(rig.chunks(rig.new_attempts(), user=name)) for name in ("one", "two")]
    for _ in range(1000):
        await asyncio.sleep(0.001)
        if a.opened == 2:
            break
    gate.set()
    assert await asyncio.gather(*asking) == [[TEXT, DONE]] * 2


class MortalLater(Script):
    """Dies in the middle of an answer, and so do all the others that it gives."""

    dead = False

    async def healthy(self) -> bool:
        return not self.dead

    async def open(self, call: Call, *, headers: Mapping[str, str]) -> Reply:
        return DyingReply(self, await super().open(call, headers=headers))


class DyingReply(Reply):
    def __init__(self, server: MortalLater, reply: Reply) -> None:
        self._server = server
        self._reply = reply

    async def __anext__(self) -> bytes:
        try:
            return await anext(self._reply)
        except ProviderFailure:
            self._server.dead = True
            raise

    async def aclose(self) -> None:
        await self._reply.aclose()


DIES = ProviderFailure(Fault.CUT, "died")


async def test_a_request_that_a_server_dies_of_in_the_middle_of_its_answer_is_not_sent_to_one_again() -> None:
    a, b = MortalLater(TEXT, DIES), MortalLater(TEXT, DIES)
    rig = Rig(two_servers(), a=a, b=b)
    assert isinstance(await failing(rig), UpstreamCut)
    a.dead = False  # it has been started again
    assert isinstance(await failing(rig), PoisonousRequest)
    assert (a.opened, b.opened) == (1, 0)


async def test_of_several_answers_that_a_death_breaks_off_each_may_be_asked_for_once_more() -> None:
    gate = asyncio.Event()
    rig = Rig(one_server(), a=(a := MortalLater(TEXT, gate, DIES)))
    asking = [asyncio.create_task(rig.chunks(rig.new_attempts(), user=name)) for name in ("one", "two")]
    while a.opened < 2:
        await asyncio.sleep(0.001)
    gate.set()
    cut = await asyncio.gather(*asking, return_exceptions=True)
    assert [type(error) for error in cut] == [UpstreamCut, UpstreamCut]
    a.dead, a.steps = False, (TEXT, DONE)
    server(rig, "a").breaker = Breaker()
    assert await rig.chunks(user="one") == [TEXT, DONE]


async def test_an_answer_does_not_go_on_at_the_server_that_has_died_of_it() -> None:
    rig = Rig(one_server(continue_cut_streams=True), a=(a := MortalLater(TEXT, DIES)))
    a.continues_messages = True
    assert isinstance(await failing(rig), UpstreamCut)
    assert a.opened == 1


async def test_a_cut_connection_to_a_living_server_says_nothing_about_the_request() -> None:
    cut = ProviderFailure(Fault.CUT, "reset")
    rig = Rig(two_servers(), a=Turns(Script(opening=cut), Script(TEXT, DONE)), b=Script(opening=cut))
    assert (await rig.chunks())[-1] == DONE


async def test_a_server_that_failed_others_meanwhile_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    a = Script(TEXT)
    rig = Rig(two_servers(), a=a, b=Script(TEXT, DONE))

    async def follow(call: Call, asked: Server, deadline: float) -> None:
        if asked.name == "a":
            asked.breaker.eject(asyncio.get_running_loop().time(), 30.0)

    monkeypatch.setattr("gateway.routing.router.follow", follow)
    assert await rig.chunks() == [TEXT, DONE]
    assert (a.opened, rig.outcomes) == (0, [("b", "ok")])


async def test_a_call_brings_its_share_of_a_hedge_once_however_often_it_is_tried() -> None:
    rig = Rig(two_servers(hedge={"after": "60s", "budget": 0.1}), a=Script(opening=status(500)), b=Script(TEXT, DONE))
    rig.router._hedging._pot = 0.0
    assert await rig.chunks() == [TEXT, DONE]
    assert rig.router._hedging._pot == pytest.approx(0.1)


async def test_a_call_whose_server_fails_comes_before_those_that_wait_for_their_turn() -> None:
    """Both servers are full, and more calls wait: whose server fails has the next place that comes free."""
    policy = a_policy(
        deployments=[
            {"name": name, "base_url": f"http://{name}.invalid/v1", "model": "m", "max_concurrency": 1} for name in "ab"
        ],
        models=[{"name": "m", "deployments": ["a", "b"]}],
    )
    fails = asyncio.Event()
    a = Turns(Failing(fails), Script(TEXT, DONE))
    b = Turns(Script(TEXT, last := asyncio.Event(), DONE), Script(TEXT, DONE))
    rig = Rig(policy, a=a, b=b)
    server(rig, "a").breaker.doubt(asyncio.get_running_loop().time(), 3600.0)  # b is the first to be asked
    order: list[str] = []

    async def ask(name: str) -> None:
        await rig.chunks(rig.new_attempts())
        order.append(name)

    on_b = asyncio.create_task(ask("on b"))
    while not b.opened:
        await asyncio.sleep(0)
    on_a = asyncio.create_task(ask("on a"))
    while not a.opened:
        await asyncio.sleep(0)
    waiting = asyncio.create_task(ask("waiting"))
    while not rig.queue.depth("realtime"):
        await asyncio.sleep(0)
    server(rig, "a").breaker.eject(asyncio.get_running_loop().time(), 3600.0)  # as one that has failed often
    fails.set()
    while not rig.fleet._moving:
        await asyncio.sleep(0.001)
    last.set()
    await asyncio.gather(on_b, on_a, waiting)
    assert order == ["on b", "on a", "waiting"] and rig.idle()
    assert (a.opened, b.opened) == (1, 3)


class Failing(Script):
    """Breaks off when it is told to."""

    def __init__(self, when: asyncio.Event) -> None:
        super().__init__()
        self.when = when

    async def open(self, call: Call, *, headers: Mapping[str, str]) -> Reply:
        await self.when.wait()
        raise ProviderFailure(Fault.CONNECT, "gone")
