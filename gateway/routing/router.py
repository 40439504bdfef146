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
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import partial

from gateway.core.errors import (
    GatewayError,
    Overloaded,
    UpstreamBusy,
    UpstreamError,
    UpstreamRefused,
    UpstreamTimeout,
    retry_after,
)
from gateway.deployments.fleet import DeploymentState, Fleet, SlotPermit
from gateway.policy import Model, Policy
from gateway.providers.base import Fault
from gateway.routing.attempt_log import OUT_OF_TIME, TOO_SLOW, AttemptLog
from gateway.routing.attempt_runner import BACKOFF_STATUSES, AttemptRunner
from gateway.routing.base import Candidate, Strategy
from gateway.routing.hedged_attempt import HedgedAttempt
from gateway.routing.hedging import HedgeBudget
from gateway.routing.quarantine_checks import raise_if_quarantined
from gateway.routing.resuming import ResumedStream, may_resume
from gateway.routing.retries import RetryBudget, backoff_seconds
from gateway.routing.upstream import Upstream
from gateway.types import Call, Operation

MAX_ATTEMPTS = 4
PAUSE_MAX_SECONDS = 15.0  # for a server that asked to be left alone: longer pauses are the caller's to make
BUSY_PAUSE_SECONDS = 0.05


class _UpstreamContext:
    """An answer, for as long as an `async with` lasts."""

    __slots__ = ("_attempts", "_call", "_permit", "_router", "_upstream")

    def __init__(self, router: Router, call: Call, permit: SlotPermit, attempts: AttemptLog) -> None:
        self._router = router
        self._call = call
        self._permit = permit
        self._attempts = attempts

    async def __aenter__(self) -> Upstream:
        self._upstream = await self._router.open_first(self._call, self._permit, self._attempts)
        if may_resume(self._call):
            self._upstream = self._router.make_resumable(self._upstream, self._call, self._permit, self._attempts)
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
        self._hedging = HedgeBudget()
        self._runner = AttemptRunner(fleet.quarantine, self._hedging)
        self.cut_streams = Counter(continued=0, given_up=0)  # of those that were to go on at another server

    @property
    def retries_refused(self) -> int:
        """How many attempts were not made because the retry budget was spent."""
        return sum(budget.refused for budget in self._budgets.values())

    def order(self, call: Call) -> list[Candidate]:
        """The model's servers, best first, then those of its fallbacks. Also what `explain` shows."""
        now = asyncio.get_running_loop().time()
        if call.policy is not self._policy:
            self._policy, self._chosen = call.policy, self._strategies[call.policy.routing.strategy]
        strategy = self._chosen[call.operation]
        if not call.model.fallbacks:
            return strategy.order(call, self._compatible_deployments(call, call.model), now)
        ordered: list[Candidate] = []
        for model in (call.model, *(call.policy.models_by_name[name] for name in call.model.fallbacks)):
            known = {candidate.deployment.name for candidate in ordered}
            deployments = [
                deployment for deployment in self._compatible_deployments(call, model) if deployment.name not in known
            ]
            ordered += strategy.order(call, deployments, now)
        return ordered

    def _compatible_deployments(self, call: Call, model: Model) -> list[DeploymentState]:
        """Its servers whose dialects have words for this call."""
        return [
            deployment
            for deployment in self._fleet.deployments_of(model)
            if deployment.provider.unsupported_error(call) is None
        ]

    def open(self, call: Call, permit: SlotPermit, attempts: AttemptLog) -> _UpstreamContext:
        """`async with` gives the first server's reply that has a first chunk. Raises `UpstreamError` and its kin."""
        return _UpstreamContext(self, call, permit, attempts)

    def make_resumable(self, begun: Upstream, call: Call, permit: SlotPermit, attempts: AttemptLog) -> Upstream:
        """What goes on at another server of the same model when it is cut."""
        if begun.deployment.name not in call.model.deployments:  # a fallback's
            return begun

        def deployments() -> list[DeploymentState]:
            known = self._fleet.deployments_of(call.model)
            return [s for s in known if s.provider.continues_final_message or call.operation is Operation.COMPLETION]

        async def open_next(rest: Call) -> Upstream:
            result = "given_up"
            try:
                upstream = await self.open_first(rest, permit, attempts)
                result = "continued"
                return upstream
            finally:
                self.cut_streams[result] += 1

        return ResumedStream(begun, call, attempts, deployments, open_next)

    async def open_first(self, call: Call, permit: SlotPermit, attempts: AttemptLog) -> Upstream:
        """As `open`; the caller closes it. `permit` is at its server then."""
        limits, loop = call.latency_class, asyncio.get_running_loop()
        deadline = call.deadline
        if call.stream:  # else the first chunk is there when all is done
            deadline = min(loop.time() + min(limits.ttft, call.read_timeout_seconds), deadline)
        budget = self._budgets.get(call.class_name)
        if budget is None:
            budget = self._budgets[call.class_name] = RetryBudget()
        budget.note_call(limits.retries)
        if limits.hedge is not None:
            self._hedging.note_call(limits.hedge)
        rounds = 0
        while True:
            candidates = self.order(call)
            if not candidates:
                _raise_refusal(call, self._fleet.deployments_of(call.model))
            upstream = await self._try_candidates(call, candidates, permit, attempts, deadline, budget)
            if upstream is not None:
                return upstream
            now = loop.time()
            soonest_seconds = _earliest_retry_at(candidates) - now
            pause_seconds = max(soonest_seconds, backoff_seconds(rounds) if attempts.done else 0.0)
            if (
                len(attempts.done) >= MAX_ATTEMPTS
                or pause_seconds > PAUSE_MAX_SECONDS
                or now + pause_seconds >= deadline
                or not candidates
            ):
                raise _no_answer_error(call, attempts, soonest_seconds)
            # Where nobody was asked, one of them has no place, or is being probed by another call.
            full = [
                candidate.deployment
                for candidate in candidates
                if candidate.deployment.breaker.would_admit(now) and not candidate.deployment.has_slot
            ]
            await self._fleet.move_when_slot_free(
                permit,
                [deployment for deployment in full if not permit.is_at(deployment)],
                max(pause_seconds, BUSY_PAUSE_SECONDS),
            )
            rounds += 1

    async def _try_candidates(
        self,
        call: Call,
        candidates: list[Candidate],
        permit: SlotPermit,
        attempts: AttemptLog,
        deadline: float,
        budget: RetryBudget,
    ) -> Upstream | None:
        """Ask the candidates in their order, each once. Raises where no more may be asked at all."""
        loop, hedge, remaining = asyncio.get_running_loop(), call.latency_class.hedge, iter(candidates)
        for candidate in remaining:
            deployment, now = candidate.deployment, loop.time()
            if len(attempts.done) >= MAX_ATTEMPTS or now >= deadline:
                return None
            if not deployment.breaker.would_admit(now) or not permit.move_to(deployment):
                continue
            raise_if_quarantined(self._fleet.quarantine, call, now)
            if attempts.done and not budget.take(now):
                raise _no_answer_error(call, attempts, _earliest_retry_at(candidates) - now)
            hedge_after_seconds = None
            if hedge is not None and hedge.budget and len(candidates) > 1:
                hedge_after_seconds = self._hedging.delay_seconds(hedge, call.model.name, call.stream)
            floor = call.latency_class.floor
            if floor is not None and (floor.chunks == 1 or len(candidates) == 1 or attempts.has_outcome(TOO_SLOW)):
                floor = None  # it says nothing, or nobody would be faster: where all are slow, slow is better than none
            if hedge_after_seconds is None:
                upstream = await self._runner.run(call, candidate, deadline, attempts, floor)
            else:
                hedged = HedgedAttempt(self._runner, call, deadline, attempts, floor)
                upstream = await hedged.run(
                    candidate, hedge_after_seconds, partial(self._choose_hedge, remaining), permit
                )
            if upstream is not None:
                return upstream
        return None

    def _choose_hedge(self, remaining: Iterator[Candidate]) -> tuple[Candidate, SlotPermit] | None:
        """For a hedge: the next that may be asked and has a place, where the budget has one left."""
        now = asyncio.get_running_loop().time()
        for candidate in remaining:
            if candidate.deployment.breaker.would_admit(now) and (
                permit := self._fleet.take([candidate.deployment], now)
            ):
                if self._hedging.take():
                    return candidate, permit
                permit.release()
                return None
        return None


def _earliest_retry_at(candidates: list[Candidate]) -> float:
    """When the first of them may be asked again, in event-loop seconds."""
    return min((candidate.deployment.breaker.next_try_at for candidate in candidates), default=0.0)


def _raise_refusal(call: Call, deployments: Sequence[DeploymentState]) -> None:
    """What the first of them says of a call that none of them has words for."""
    for deployment in deployments:
        if (refusal := deployment.provider.unsupported_error(call)) is not None:
            raise UpstreamRefused(refusal.status or 400, refusal.body, refusal.content_type)


def _no_answer_error(call: Call, attempts: AttemptLog, soonest_seconds: float) -> GatewayError:
    if not attempts.done:
        return Overloaded(
            f"no deployment of {call.model.name} may be asked now: all have failed, or asked to be left alone",
            retry_after_seconds=max(soonest_seconds, BUSY_PAUSE_SECONDS),
        )
    tried = ", ".join(f"{a.deployment} ({a.outcome})" for a in attempts.done)
    kind = UpstreamError
    if attempts.done[-1].outcome in (Fault.TIMEOUT.value, OUT_OF_TIME):
        kind = UpstreamTimeout
    elif all(attempt.status in BACKOFF_STATUSES for attempt in attempts.done):
        kind = UpstreamBusy
    message = f"no deployment answered: {tried}"
    if attempts.last_error_text:
        message += f"; {attempts.last_error_text}"
    error = kind(message, attempts=attempts.as_error_details())
    if soonest_seconds > 0:
        error.headers.update(retry_after(soonest_seconds))
    return error
