"""Phase 6: candidates in order of predicted cost, opened until one gives a first chunk.

Failover ends with the first useful chunk: until then nothing has been sent, so another server may be asked, and the
same ones again after a pause; after it, a failure is told in the stream. A server that refuses the request itself
(400, 404, 413, 422) speaks for all of them.

Asking again is bounded three times: by `MAX_ATTEMPTS` per call, by the class's time to the first chunk, and by the
class's retry budget, which is a share of the traffic. A server whose breaker is open is not asked; where that holds
for all of them the caller is told so at once, with the time at which one of them will be tried.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterator, Mapping

import msgspec

from gateway.errors import (
    GatewayError,
    Overloaded,
    UpstreamBusy,
    UpstreamError,
    UpstreamRefused,
    UpstreamTimeout,
    retry_after,
)
from gateway.fleet import Fleet, Place, SentCall, Server
from gateway.policy import Floor, Policy
from gateway.providers.base import Fault, ProviderFailure, Reply
from gateway.providers.sse import count_events, ends_stream, has_output
from gateway.routing import poison
from gateway.routing.attempts import CLIENT_GONE, HEDGE_LOST, Attempts
from gateway.routing.base import Candidate, Strategy
from gateway.routing.continuing import Unbroken, may_go_on
from gateway.routing.following import follow
from gateway.routing.hedging import Hedging
from gateway.routing.retries import RetryBudget, backoff_seconds
from gateway.routing.upstream import Upstream
from gateway.timers import WaitBound
from gateway.types import Call, Operation

MAX_ATTEMPTS = 4
MAX_OPENING_BYTES = 256 * 1024  # of frames without output that are held back before the first with some
PATIENCE_SECONDS = 15.0  # for a server that asked to be left alone: longer pauses are the caller's to make
BUSY_PAUSE_SECONDS = 0.05
UNNAMED_REST_SECONDS = 1.0  # of a 429 that says no time
RESTING_STATUSES = frozenset({429, 503})
CUT = Fault.CUT.value
SERVER_FAULTS = frozenset(f.value for f in (Fault.CONNECT, Fault.TIMEOUT, Fault.CUT, Fault.MALFORMED))
FAIR_SHARE = 0.9  # of the class's time: who had less, because the client hurries or others used it, is not at fault
# Outcomes that no fault stands for.
GIVEN_UP, TOO_SLOW, OUT_OF_TIME = "given_up", "too_slow", "out_of_time"


class _Opening:
    __slots__ = ("_attempts", "_call", "_place", "_router", "_upstream")

    def __init__(self, router: Router, call: Call, place: Place, attempts: Attempts) -> None:
        self._router = router
        self._call = call
        self._place = place
        self._attempts = attempts

    async def __aenter__(self) -> Upstream:
        self._upstream = await self._router.first_to_answer(self._call, self._place, self._attempts)
        if may_go_on(self._call):
            self._upstream = self._router.unbroken(self._upstream, self._call, self._place, self._attempts)
        return self._upstream

    async def __aexit__(self, *_: object) -> None:
        await self._upstream.aclose()


class Router:
    def __init__(self, fleet: Fleet, strategies: Mapping[str, Mapping[Operation, Strategy]]) -> None:
        self._fleet = fleet
        self._strategies = strategies
        self._policy: Policy | None = None  # that of the last call
        self._chosen: Mapping[Operation, Strategy] = {}  # which it names
        self._budgets: dict[str, RetryBudget] = {}  # by class, of which a policy has a handful
        self._hedging = Hedging()
        self.cut_streams = Counter(continued=0, given_up=0)  # of those that were to go on at another server

    @property
    def retries_refused(self) -> int:
        """How many attempts were not made because the retry budget was spent. For telemetry."""
        return sum(budget.refused for budget in self._budgets.values())

    def order(self, call: Call) -> list[Candidate]:
        """The model's servers, best first, then those of its fallbacks. Also what `explain` shows."""
        now = asyncio.get_running_loop().time()
        if call.policy is not self._policy:
            self._policy, self._chosen = call.policy, self._strategies[call.policy.routing.strategy]
        strategy = self._chosen[call.operation]
        if not call.model.fallbacks:
            return strategy.order(call, self._fleet.servers_of(call.model), now)
        ordered: list[Candidate] = []
        for model in (call.model, *(call.policy.models_by_name[name] for name in call.model.fallbacks)):
            known = {candidate.server.name for candidate in ordered}
            servers = [server for server in self._fleet.servers_of(model) if server.name not in known]
            ordered += strategy.order(call, servers, now)
        return ordered

    def open(self, call: Call, place: Place, attempts: Attempts) -> _Opening:
        """`async with` gives the first server's reply that has a first chunk. Raises `UpstreamError` and its kin."""
        return _Opening(self, call, place, attempts)

    def unbroken(self, begun: Upstream, call: Call, place: Place, attempts: Attempts) -> Upstream:
        """What goes on at another server of the same model when it is cut."""
        if begun.server.name not in call.model.deployments:  # a fallback's
            return begun

        def servers() -> list[Server]:
            known = self._fleet.servers_of(call.model)
            return [s for s in known if s.provider.continues_messages or call.operation is Operation.COMPLETION]

        async def open_next(rest: Call) -> Upstream:
            result = "given_up"
            try:
                upstream = await self.first_to_answer(rest, place, attempts)
                result = "continued"
                return upstream
            finally:
                self.cut_streams[result] += 1

        return Unbroken(begun, call, attempts, servers, open_next)

    async def first_to_answer(self, call: Call, place: Place, attempts: Attempts) -> Upstream:
        limits, loop = call.latency_class, asyncio.get_running_loop()
        deadline = call.deadline
        if call.stream:  # else the first chunk is there when all is done
            deadline = min(loop.time() + min(limits.ttft, call.patience_seconds), deadline)
        budget = self._budgets.get(call.class_name)
        if budget is None:
            budget = self._budgets[call.class_name] = RetryBudget()
        budget.note_call(limits.retries)
        if limits.hedge is not None:
            self._hedging.note_call(limits.hedge)
        rounds = 0
        while True:
            candidates = self.order(call)
            upstream = await self._one_round(call, candidates, place, attempts, deadline, budget)
            if upstream is not None:
                return upstream
            now = loop.time()
            soonest_seconds = _soonest(candidates) - now
            pause_seconds = max(soonest_seconds, backoff_seconds(rounds) if attempts.done else 0.0)
            if (
                len(attempts.done) >= MAX_ATTEMPTS
                or pause_seconds > PATIENCE_SECONDS
                or now + pause_seconds >= deadline
                or not candidates
            ):
                raise _nobody_answered(call, attempts, soonest_seconds)
            # Where nobody was asked, one of them has no place, or is being probed by another call.
            full = [
                candidate.server
                for candidate in candidates
                if candidate.server.breaker.would_allow(now) and not candidate.server.has_place
            ]
            await self._fleet.move_when_free(
                place, [server for server in full if not place.is_at(server)], max(pause_seconds, BUSY_PAUSE_SECONDS)
            )
            rounds += 1

    async def _one_round(
        self,
        call: Call,
        candidates: list[Candidate],
        place: Place,
        attempts: Attempts,
        deadline: float,
        budget: RetryBudget,
    ) -> Upstream | None:
        """Ask the candidates in their order, each once. Raises where no more may be asked at all."""
        loop, hedge, remaining = asyncio.get_running_loop(), call.latency_class.hedge, iter(candidates)
        for candidate in remaining:
            server, now = candidate.server, loop.time()
            if len(attempts.done) >= MAX_ATTEMPTS or now >= deadline:
                return None
            if not server.breaker.would_allow(now) or not place.move_to(server):
                continue
            poison.check(self._fleet.suspects, call, now)
            if attempts.done and not budget.take(now):
                raise _nobody_answered(call, attempts, _soonest(candidates) - now)
            late_after = None
            if hedge is not None and hedge.budget and len(candidates) > 1:
                late_after = self._hedging.delay_seconds(hedge, call.model.name, call.stream)
            floor = call.latency_class.floor
            if floor is not None and (floor.chunks == 1 or len(candidates) == 1 or attempts.was(TOO_SLOW)):
                floor = None  # it says nothing, or nobody would be faster: where all are slow, slow is better than none
            if late_after is None:
                upstream = await self._attempt(call, candidate, deadline, attempts, floor)
            else:
                race = _Race(self, call, deadline, attempts, floor)
                upstream = await race.run(candidate, remaining, place, late_after)
            if upstream is not None:
                return upstream
        return None

    async def _attempt(
        self,
        call: Call,
        candidate: Candidate,
        deadline: float,
        attempts: Attempts,
        floor: Floor | None,
        *,
        racing: bool = False,
    ) -> Upstream | None:
        """One server's answer up to its first useful chunk, or None where another is to be asked. `racing`: in a task
        of its own, which whoever started it may cancel."""
        server, loop = candidate.server, asyncio.get_running_loop()
        await follow(call, server, deadline)
        started = loop.time()
        if not server.breaker.would_allow(started):
            return None  # meanwhile it has failed others, or one of them has become its probe
        attempts.ask(server)
        span_id, started_ns = attempts.new_span_id(), time.time_ns()
        reply: Reply | None = None
        server.breaker.allows(started)
        server.asked_at = started
        sent = server.send(call, started, streams=call.stream, believed=candidate.believed)
        wait = WaitBound(deadline - started, task=None if racing else attempts.task)
        wait.begin()
        outcome, status = GIVEN_UP, None
        try:
            asked = call if sent.slot is None else msgspec.structs.replace(call, slot=sent.slot)
            reply = await server.provider.open(asked, headers=attempts.headers(span_id))
            first = await anext(reply)
            if call.stream and (floor is not None or not has_output(first)):
                first = await _whole_opening(first, reply, floor)
            outcome, status = "ok", 200
        except asyncio.CancelledError:
            if not wait.expired:
                outcome = attempts.cancelled_as
                raise
            wait.uncancel()
            outcome = _late(call, loop.time() - started)
        except TimeoutError:
            outcome = TOO_SLOW
        except StopAsyncIteration:
            outcome = CUT
        except ProviderFailure as failure:
            outcome, status = _outcome(failure), failure.status
            if failure.fault is not Fault.CUT:
                attempts.asked = None
            if failure.fault is Fault.REFUSED:
                raise UpstreamRefused(failure.status or 400, failure.body, failure.content_type) from None
            _rest(server, failure, loop.time())
        finally:
            wait.close()
            ended = loop.time()
            if outcome == CUT:
                server.note_cut(ended)
            _judge(server, outcome, status, ended)
            if outcome != "ok":
                sent.end(ended, answered=False)
                attempts.add(sent, outcome, started_ns, span_id, status)
                if reply is not None:
                    await reply.aclose()
        if outcome == CUT:
            await poison.after_cut(self._fleet.suspects, server, call)
        if outcome != "ok":
            return None
        assert reply is not None
        self._learn(call, sent, started, ended)
        attempts.add(sent, outcome, started_ns, span_id, status)
        return Upstream(call, candidate, sent, reply, first, attempts.task, self._fleet.suspects)

    def _learn(self, call: Call, sent: SentCall, started: float, now: float) -> None:
        """From how long a first chunk took."""
        if call.stream:
            sent.server.first_chunks.append((now, now - started))
        sent.first_chunk(now)
        if call.latency_class.hedge is not None:
            self._hedging.note(call.model.name, call.stream, now - started)

    def second_server(self, remaining: Iterator[Candidate]) -> tuple[Candidate, Place] | None:
        """For a hedge: the next that may be asked and has a place, where the budget has one left."""
        now = asyncio.get_running_loop().time()
        for candidate in remaining:
            if candidate.server.breaker.would_allow(now) and (place := self._fleet.take([candidate.server], now)):
                if self._hedging.take():
                    return candidate, place
                place.release()
                return None
        return None


class _Race:
    """Two servers asked for one answer. However it ends, whoever has not won is cancelled before it returns."""

    def __init__(self, router: Router, call: Call, deadline: float, attempts: Attempts, floor: Floor | None) -> None:
        self._router = router
        self._call = call
        self._deadline = deadline
        self._attempts = attempts
        self._floor = floor
        self._tasks: list[asyncio.Task[Upstream | None]] = []

    async def run(
        self, first: Candidate, remaining: Iterator[Candidate], place: Place, late_after_seconds: float
    ) -> Upstream | None:
        """The first answer; None where neither gave one. `place` is at the winner's server then."""
        won: Upstream | None = None
        second: tuple[Candidate, Place] | None = None
        try:
            self._start(first)
            await asyncio.wait(self._tasks, timeout=late_after_seconds)
            if not self._tasks[0].done() and (second := self._router.second_server(remaining)) is not None:
                self._start(second[0])
            won = await self._first_result()
            if won is not None and second is not None and won.server is second[0].server:
                place.swap(second[1])
            return won
        finally:
            await self._end_others(won)
            if second is not None:
                second[1].release()

    def _start(self, candidate: Candidate) -> None:
        attempt = self._router._attempt(self._call, candidate, self._deadline, self._attempts, self._floor, racing=True)
        self._tasks.append(asyncio.create_task(attempt))

    async def _first_result(self) -> Upstream | None:
        pending = set(self._tasks)
        while pending:
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                if (upstream := task.result()) is not None:
                    return upstream
        return None

    async def _end_others(self, won: Upstream | None) -> None:
        attempts = self._attempts
        attempts.cancelled_as = HEDGE_LOST if won is not None else CLIENT_GONE
        for task in self._tasks:
            task.cancel()
        await asyncio.wait(self._tasks)
        attempts.cancelled_as = CLIENT_GONE
        for task in self._tasks:
            if not task.cancelled() and task.exception() is None:
                other = task.result()
                if other is not None and other is not won:  # both answered in the same moment
                    attempts.lose(other.server)
                    await other.aclose()
        if won is not None:
            attempts.asked = won.server
            attempts.winner_last(won.server.name)


async def _whole_opening(first: bytes, reply: Reply, floor: Floor | None) -> bytes:
    """`first` and what follows, up to the first output; where there is a floor, as many events as it says.

    Raises `TimeoutError` where they do not come as fast as the floor wants.
    """
    while not has_output(first) and len(first) < MAX_OPENING_BYTES:
        first += await anext(reply)
    if floor is not None:
        async with asyncio.timeout(floor.within):
            while count_events(first) < floor.chunks and not ends_stream(first):
                first += await anext(reply)
    return first


def _late(call: Call, seconds: float) -> str:
    """Whose fault it is that nothing came for so long."""
    limit_seconds = call.latency_class.ttft if call.stream else call.latency_class.total
    return Fault.TIMEOUT.value if seconds >= FAIR_SHARE * limit_seconds else OUT_OF_TIME


def _outcome(failure: ProviderFailure) -> str:
    return f"status_{failure.status}" if failure.fault is Fault.STATUS else failure.fault.value


def _judge(server: Server, outcome: str, status: int | None, now: float) -> None:
    """Only what is the server's fault counts against it: not a refused request, our own bounds, or a client's."""
    if outcome == "ok":
        server.breaker.succeeded(now)
    elif outcome in SERVER_FAULTS or (status is not None and status >= 500):
        server.breaker.failed(now)
    else:
        server.breaker.abandoned()


def _rest(server: Server, failure: ProviderFailure, now: float) -> None:
    """A server that has too much to do says for how long it wants to be left alone, or at least that it does."""
    if failure.status in RESTING_STATUSES and (failure.status == 429 or failure.retry_after_seconds is not None):
        seconds = UNNAMED_REST_SECONDS if failure.retry_after_seconds is None else failure.retry_after_seconds
        server.breaker.rest(now, seconds)


def _soonest(candidates: list[Candidate]) -> float:
    """When the first of them may be asked again, in event-loop seconds."""
    return min((candidate.server.breaker.asked_after for candidate in candidates), default=0.0)


def _nobody_answered(call: Call, attempts: Attempts, soonest_seconds: float) -> GatewayError:
    if not attempts.done:
        return Overloaded(
            f"no deployment of {call.model.name} may be asked now: all have failed, or asked to be left alone",
            retry_after_seconds=max(soonest_seconds, BUSY_PAUSE_SECONDS),
        )
    tried = ", ".join(f"{a.deployment} ({a.outcome})" for a in attempts.done)
    kind = UpstreamError
    if attempts.done[-1].outcome in (Fault.TIMEOUT.value, OUT_OF_TIME):
        kind = UpstreamTimeout
    elif all(attempt.status in RESTING_STATUSES for attempt in attempts.done):
        kind = UpstreamBusy
    error = kind(f"no deployment answered: {tried}", attempts=attempts.told())
    if soonest_seconds > 0:
        error.headers.update(retry_after(soonest_seconds))
    return error
