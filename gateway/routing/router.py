"""Phase 6: candidates in order of predicted cost, opened until one gives a first chunk.

Failover ends with the first chunk: until then nothing has been sent, so another server may be asked; after it, a
failure is told in the stream. A server that refuses the request itself (400, 404, 413, 422) speaks for all of them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import Any

from gateway.errors import UpstreamCut, UpstreamError, UpstreamRefused, UpstreamTimeout
from gateway.fleet import Fleet, Place, Server
from gateway.providers.base import Fault, ProviderFailure, Reply, Sink
from gateway.routing.base import Candidate, Strategy
from gateway.timers import WaitBound
from gateway.types import Attempt, Call, Operation

MAX_ATTEMPTS = 4
SERVER_FAULTS = frozenset({Fault.CONNECT, Fault.TIMEOUT, Fault.CUT, Fault.MALFORMED})


class Upstream:
    """An opened reply with its first chunk in hand. Breaks with `UpstreamCut`."""

    def __init__(
        self, call: Call, chosen: Candidate, reply: Reply, first: bytes, task: asyncio.Task[Any] | None
    ) -> None:
        self.reply = reply
        self.chosen = chosen
        self.server = chosen.server
        self.matched_tokens = chosen.matched_tokens
        self.fault: Fault | None = None  # why it broke, once it has
        self._call = call
        self._first = first
        self._task = task
        self._wait: WaitBound | None = None

    async def first(self) -> bytes:
        return self._first

    async def pour(self, sink: Sink) -> bool:
        """Give `sink` the chunks behind the first, as `Reply.pour` does, each within the class's time of the last."""
        if self._wait is None:
            limits = self._call.latency_class
            self._wait = WaitBound(limits.inter_token, self._call.deadline, task=self._task)
        wait = self._wait

        def taking(chunk: bytes) -> bool:
            wait.begin()
            return sink(chunk)

        wait.begin()
        try:
            return await self.reply.pour(taking)
        except ProviderFailure as failure:
            self.fault = failure.fault
            raise UpstreamCut(f"{self.server.name}: {failure}") from None
        except asyncio.CancelledError:
            if not wait.expired:
                raise
            wait.uncancel()
            self.fault = Fault.TIMEOUT
            seconds = self._call.latency_class.inter_token
            raise UpstreamCut(f"{self.server.name} sent nothing for {seconds:g} s, or took too long in all") from None
        finally:
            wait.end()

    async def aclose(self) -> None:
        """The call is over at this server. Once."""
        self.server.in_flight -= 1
        if self._wait is not None:
            self._wait.close()
        await self.reply.aclose()


class _Opening:
    __slots__ = ("_attempts", "_call", "_place", "_router", "_upstream")

    def __init__(self, router: Router, call: Call, place: Place, attempts: Attempts) -> None:
        self._router = router
        self._call = call
        self._place = place
        self._attempts = attempts

    async def __aenter__(self) -> Upstream:
        self._upstream = await self._router.first_to_answer(self._call, self._place, self._attempts)
        return self._upstream

    async def __aexit__(self, *_: object) -> None:
        await self._upstream.aclose()


class Attempts:
    """What was tried for one call, in order. Written by the router, read by the receipt and the spans."""

    def __init__(
        self,
        new_span_id: Callable[[], int],
        headers: Callable[[int], Mapping[str, str]],
        task: asyncio.Task[Any] | None = None,
    ) -> None:
        self.task = task  # whose call it is, for who has it at hand
        self.done: list[Attempt] = []
        self.asked: Server | None = None  # the last one that took the call and may have worked on it
        self.new_span_id = new_span_id
        self.headers = headers  # of an attempt, by its span id

    def add(self, candidate: Candidate, outcome: str, started_ns: int, span_id: int, status: int | None) -> None:
        self.done.append(
            Attempt(
                deployment=candidate.server.name,
                outcome=outcome,
                started_ns=started_ns,
                ended_ns=time.time_ns(),
                span_id=span_id,
                status=status,
                predicted_cached_tokens=candidate.matched_tokens,
            )
        )

    def conclude(self, outcome: str) -> None:
        """The last attempt, which had answered, is over now, in this way."""
        last = self.done[-1]
        self.done[-1] = Attempt(
            last.deployment, outcome, last.started_ns, time.time_ns(), last.span_id, last.status,
            last.predicted_cached_tokens,
        )  # fmt: skip

    def told(self) -> list[dict[str, object]]:
        """The attempts as a refused caller is told of them."""
        return [{"deployment": a.deployment, "outcome": a.outcome, "status": a.status} for a in self.done]


class Router:
    def __init__(self, fleet: Fleet, strategies: Mapping[Operation, Strategy]) -> None:
        self._fleet = fleet
        self._strategies = strategies

    def order(self, call: Call) -> list[Candidate]:
        """The model's servers, best first, then those of its fallbacks. Also what `explain` shows."""
        now, strategy = asyncio.get_running_loop().time(), self._strategies[call.operation]
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

    async def first_to_answer(self, call: Call, place: Place, attempts: Attempts) -> Upstream:
        limits = call.latency_class
        # A call that does not stream has its first chunk when it is done.
        deadline = min(asyncio.get_running_loop().time() + limits.ttft, call.deadline) if call.stream else call.deadline
        for candidate in self.order(call):
            if len(attempts.done) == MAX_ATTEMPTS or asyncio.get_running_loop().time() >= deadline:
                break
            if not place.move_to(candidate.server):
                continue
            upstream = await self._attempt(call, candidate, deadline, attempts)
            if upstream is not None:
                return upstream
        raise _nobody_answered(attempts)

    async def _attempt(self, call: Call, candidate: Candidate, deadline: float, attempts: Attempts) -> Upstream | None:
        """One server's answer up to its first chunk, or None where the next one is to be asked."""
        server, loop = candidate.server, asyncio.get_running_loop()
        missing = max(0, call.prompt_tokens_estimate - candidate.matched_tokens)
        span_id, started_ns, started = attempts.new_span_id(), time.time_ns(), loop.time()
        reply: Reply | None = None
        attempts.asked = server
        server.in_flight += 1
        server.prefill_tokens_queued += missing
        server.cache.add(call.fingerprint)  # at once, so that what comes meanwhile with the same prefix follows
        wait = WaitBound(deadline - started, task=attempts.task)
        wait.begin()
        outcome, status = "given_up", None
        try:
            reply = await server.provider.open(call, headers=attempts.headers(span_id))
            first = await anext(reply)
            outcome, status = "ok", 200
        except asyncio.CancelledError:
            if not wait.expired:
                outcome = "client_gone"
                raise
            wait.uncancel()
            outcome = Fault.TIMEOUT.value
            server.failed(loop.time())
        except StopAsyncIteration:
            outcome = Fault.CUT.value
            server.failed(loop.time())
        except ProviderFailure as failure:
            outcome, status = _outcome(failure), failure.status
            _blame(server, failure, loop.time())
            if failure.fault is not Fault.CUT:
                attempts.asked = None
            if failure.fault is Fault.REFUSED:
                raise UpstreamRefused(failure.status or 400, failure.body, failure.content_type) from None
        finally:
            wait.close()
            server.prefill_tokens_queued -= missing
            if outcome != "ok":
                server.in_flight -= 1
                attempts.add(candidate, outcome, started_ns, span_id, status)
                if reply is not None:
                    await reply.aclose()
        if outcome != "ok":
            return None
        assert reply is not None
        server.succeeded()
        server.learn_prefill(missing, loop.time() - started if call.stream else 0.0)
        attempts.add(candidate, outcome, started_ns, span_id, status)
        return Upstream(call, candidate, reply, first, attempts.task)


def _outcome(failure: ProviderFailure) -> str:
    return f"status_{failure.status}" if failure.fault is Fault.STATUS else failure.fault.value


def _blame(server: Server, failure: ProviderFailure, now: float) -> None:
    """Only what is the server's fault makes others go first: not a refused request, nor our own bounds."""
    if failure.fault in SERVER_FAULTS or (failure.fault is Fault.STATUS and (failure.status or 500) >= 500):
        server.failed(now)


def _nobody_answered(attempts: Attempts) -> UpstreamError:
    tried = ", ".join(f"{a.deployment} ({a.outcome})" for a in attempts.done) or "none had a place"
    kind = UpstreamTimeout if attempts.done and attempts.done[-1].outcome == Fault.TIMEOUT.value else UpstreamError
    return kind(f"no deployment answered: {tried}", attempts=attempts.told())
