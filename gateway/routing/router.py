"""Routing, phase 6: tries deployments in order of predicted cost until one of them sends a first chunk.

`Router.open` asks the policy's strategy for candidates and runs attempts on them (`attempt_runner.py`), hedged if the
latency class says so (`hedged_attempt.py`). Failover ends with the first useful chunk. Until then the client has
received nothing, so the call may be retried: on other deployments, and after a pause on the same ones. Afterwards a
failure is reported in the stream, or the stream is resumed on another deployment (`resuming.py`). A deployment that
rejects the request itself (400, 413, 422) speaks for all of them. If the request is at fault for an error (`blame.py`),
it is tried at one other deployment, and the client gets the deployment's own error.

If the prompt is too long for a model, or a model refuses the content, the call goes to the models that `fallbacks_when`
names for this case.

A stream's attempt gets half of the time that is left to the first chunk if another deployment may answer, so that a
silent deployment does not use up the time of the others. Three bounds limit retries: `MAX_ATTEMPTS` per call, the
class's time to the first chunk, and the retry budget of the call's tenant and class, which is a share of their traffic.
A deployment whose circuit breaker is open gets no request. If that applies to all deployments of a model, the caller is
refused at once, with the time of the next probe.
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
from gateway.deployments.capabilities import features_of
from gateway.deployments.fleet import Fleet
from gateway.deployments.slot_permit import SlotPermit
from gateway.deployments.state import DeploymentState
from gateway.policy import Model, Policy
from gateway.providers.base import Fault
from gateway.providers.media_fetch.base import MediaSource
from gateway.routing.attempt_log import NOT_SENT, OUT_OF_TIME, TOO_SLOW, AttemptLog
from gateway.routing.attempt_runner import TTFT_SHARE, AttemptRunner
from gateway.routing.base import Candidate, ServingStrategy
from gateway.routing.blame import BACKOFF_STATUSES, raise_if_quarantined, review_errors
from gateway.routing.block_source import with_block_source
from gateway.routing.hedge_budget import HedgeBudget
from gateway.routing.hedged_attempt import HedgedAttempt
from gateway.routing.remote_prefill import RemotePrefill
from gateway.routing.resuming import ResumedStream, can_continue, may_resume
from gateway.routing.retries import RetryBudget, RetryBudgets, backoff_seconds
from gateway.routing.route_log import RouteLog
from gateway.routing.upstream import Upstream
from gateway.types import Call, Operation

MAX_ATTEMPTS = 4
CONVICTIONS_TO_REFUSE = 2  # deployments that answer others and fail at one request, after which it is refused
CRASHES_TO_STOP = 2  # of deployments during one call, after which it is not tried again
PAUSE_MAX_SECONDS = 15.0  # between two rounds of attempts; a longer pause is left to the caller, by `retry-after`
BUSY_PAUSE_SECONDS = 0.05  # the shortest wait for a slot, or for another call's probe


class _UpstreamContext:
    """Async context manager: opens an upstream for a call, and closes it on every way out."""

    __slots__ = ("_attempts", "_call", "_permit", "_router", "_upstream")

    def __init__(self, router: Router, call: Call, permit: SlotPermit, attempts: AttemptLog) -> None:
        self._router = router
        self._call = call
        self._permit = permit
        self._attempts = attempts

    async def __aenter__(self) -> Upstream:
        self._upstream = await self._router.open_first(self._call, self._permit, self._attempts)
        if self._upstream.api is None and may_resume(self._call):
            self._upstream = self._router.make_resumable(self._upstream, self._call, self._permit, self._attempts)
        return self._upstream

    async def __aexit__(self, *_: object) -> None:
        await self._upstream.aclose()


class Router:
    """Opens upstreams for calls. One per process; owned by the event loop."""

    def __init__(
        self,
        fleet: Fleet,
        strategies: Mapping[str, Mapping[Operation, ServingStrategy]],
        route_log: RouteLog | None = None,
        media: MediaSource | None = None,
    ) -> None:
        """`strategies` are keyed by their name in the policy, then by operation.

        `route_log` takes the decisions of calls whose policy says so. `media` fetches media by URL.
        """
        self._route_log = route_log
        self._fleet = fleet
        self._strategies = strategies
        self._policy: Policy | None = None  # of the last call
        self._chosen: Mapping[Operation, ServingStrategy] = {}  # the strategy that this policy names, by operation
        self._logs_routes = False  # whether this policy says so
        self._retry_budgets = RetryBudgets()
        self._hedge_budget = HedgeBudget()
        self._runner = AttemptRunner(fleet.quarantine, self._hedge_budget, media)
        self._remote_prefill = RemotePrefill(fleet, self._runner)
        self.cut_streams = Counter(continued=0, given_up=0)  # attempts to resume a cut stream, by result

    @property
    def retries_refused(self) -> int:
        """How many attempts were not made because a retry budget was spent."""
        return self._retry_budgets.refused

    def order(
        self, call: Call, now: float, models: Sequence[str] | None = None, *, explains_cost: bool = True
    ) -> list[Candidate]:
        """The deployments of `models`, best first; by default, of the call's model and then of its fallbacks.

        `explain` shows them. Unless `explains_cost`, a deployment to which there is no alternative gets no cost.
        """
        if call.policy is not self._policy:
            self._use(call.policy)
        strategy = self._chosen[call.operation]
        if models is None:
            if not call.model.fallbacks:
                deployments = self._compatible_deployments(call, call.model)
                if len(deployments) == 1 and not explains_cost:
                    return [strategy.only(call, deployments[0], now)]
                candidates = strategy.order(call, deployments, now)
                return _capable_first(call, _preferred_first(call, candidates), now)
            models = (call.model_name, *call.model.fallbacks)
        ordered: list[Candidate] = []
        for name in models:
            # The call's own model may have fewer deployments than the policy's, because of a route.
            model = call.model if name == call.model_name else call.policy.models_by_name[name]
            listed = {candidate.deployment.name for candidate in ordered}
            deployments = [
                deployment for deployment in self._compatible_deployments(call, model) if deployment.name not in listed
            ]
            ordered += _preferred_first(call, strategy.order(call, deployments, now))
        return _capable_first(call, ordered, now)

    def prefill_of(self, call: Call, candidate: Candidate, now: float) -> Candidate | None:
        """The prefill deployment that would compute the prompt for one of the call's candidates, if any."""
        return self._remote_prefill.choose(call, candidate, self._chosen[call.operation], now)

    def _use(self, policy: Policy) -> None:
        routing = policy.routing
        self._policy, self._chosen = policy, self._strategies[routing.strategy]
        self._logs_routes = routing.log and self._route_log is not None

    def _compatible_deployments(self, call: Call, model: Model) -> list[DeploymentState]:
        """The model's deployments whose dialect can express the call."""
        return [
            deployment
            for deployment in self._fleet.deployments_of(model)
            if deployment.provider.unsupported_error(call) is None
        ]

    def open(self, call: Call, permit: SlotPermit, attempts: AttemptLog) -> _UpstreamContext:
        """Async context manager that yields the first upstream with a first chunk, and then closes it.

        Raises `UpstreamError` or a subclass, `Overloaded`, `QuarantinedRequest`, and `LedgerUnavailable`.
        """
        return _UpstreamContext(self, call, permit, attempts)

    def make_resumable(self, first: Upstream, call: Call, permit: SlotPermit, attempts: AttemptLog) -> Upstream:
        """An upstream that another deployment resumes if its stream is cut: one of the model, else of its fallbacks."""
        models = (call.model, *(call.policy.models_by_name[name] for name in call.model.fallbacks))
        deployments = [*dict.fromkeys(one for model in models for one in self._fleet.deployments_of(model))]
        others = [one for one in deployments if one is not first.deployment and can_continue(one, call)]
        # Recording the answer costs some time for each chunk, so it must be of use.
        if not others and not call.model.continue_cut_streams:
            return first

        async def open_next(continuation: Call) -> Upstream:
            result = "given_up"
            try:
                upstream = await self.open_first(continuation, permit, attempts)
                result = "continued"
                return upstream
            finally:
                self.cut_streams[result] += 1

        return ResumedStream(first, call, attempts, deployments, open_next)

    async def open_first(self, call: Call, permit: SlotPermit, attempts: AttemptLog) -> Upstream:
        """As `open`, but the caller closes the upstream. `permit` then holds a slot at the upstream's deployment."""
        limits, loop = call.latency_class, attempts.loop
        if call.policy is not self._policy:
            self._use(call.policy)
        is_logged, deadline = self._logs_routes, call.deadline
        if call.stream:  # without streaming, the first chunk is the whole answer
            deadline = min(loop.time() + min(limits.ttft, call.read_timeout_seconds), deadline)
        budget = self._retry_budgets.of(call.principal.tenant_name, call.class_name)
        budget.note_call(limits.retries)
        if limits.hedge is not None:
            self._hedge_budget.note_call(limits.hedge)
        rounds = 0
        models: Sequence[str] | None = None  # to be tried instead of the call's model, for `fallbacks_when`
        while True:
            candidates = self.order(call, loop.time(), models, explains_cost=is_logged)
            if not candidates:
                _raise_refusal(call, self._fleet.deployments_of(call.model))
            candidates = _remaining(candidates, attempts)
            try:
                upstream = await self._try_candidates(call, candidates, permit, attempts, deadline, budget)
            except UpstreamRefused as refusal:
                if models is None:
                    models, attempts.refusal = call.model.fallbacks_when.models(refusal.reason), refusal
                if not models:
                    raise
                attempts.rejected_at.add(attempts.done[-1].deployment)
                continue
            if upstream is not None:
                if is_logged and self._route_log is not None:
                    upstream.on_released = partial(self._route_log.record, call, candidates)
                return upstream
            candidates = _remaining(candidates, attempts)
            now = loop.time()
            retry_in_seconds = _earliest_retry_at(candidates) - now
            pause_seconds = max(retry_in_seconds, backoff_seconds(rounds) if attempts.tries else 0.0)
            if (
                attempts.tries >= MAX_ATTEMPTS
                or attempts.crashes >= CRASHES_TO_STOP
                or pause_seconds > PAUSE_MAX_SECONDS
                or now + pause_seconds >= deadline
                or all(candidate.deployment.ejections.reason for candidate in candidates)
            ):
                raise_if_quarantined(self._fleet.quarantine, call, now)
                raise _no_answer_error(call, attempts, candidates, now)
            # If no deployment was tried, each one has no free slot, or another call is probing it.
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
        """Try the candidates in their order, each at most once. None if all failed.

        Raises if no further attempt is allowed: the request is quarantined, or the retry budget is spent.
        """
        loop, hedge, remaining = attempts.loop, call.latency_class.hedge, iter(candidates)
        for candidate in remaining:
            deployment, now = candidate.deployment, loop.time()
            if attempts.tries >= MAX_ATTEMPTS or attempts.crashes >= CRASHES_TO_STOP or now >= deadline:
                return None
            if attempts.refusal is not None and len(attempts.convicted_at) >= CONVICTIONS_TO_REFUSE:
                raise attempts.refusal
            if not deployment.breaker.would_admit(now) or not permit.move_to(deployment):
                continue
            raise_if_quarantined(self._fleet.quarantine, call, now)
            if attempts.tries and not budget.take(now):
                self._retry_budgets.refused += 1
                raise _no_answer_error(call, attempts, candidates, now)
            hedge_after_seconds = None
            if hedge is not None and hedge.budget and len(candidates) > 1:
                hedge_after_seconds = self._hedge_budget.delay_seconds(hedge, call.model_name, call.stream)
            floor = call.latency_class.floor
            if floor is not None and (floor.chunks == 1 or len(candidates) == 1 or attempts.has_outcome(TOO_SLOW)):
                floor = None  # one chunk is no rate; and if no deployment is faster, a slow answer beats none
            if deployment.role is None:
                prepared = candidate
                if call.has_prefix:
                    prepared = with_block_source(call.fingerprint, candidate, candidates, now)
            else:
                strategy, prepare = self._chosen[call.operation], self._remote_prefill.prepare
                found = await prepare(call, candidate, candidates, strategy, permit, deadline, attempts)
                if found is None:
                    continue
                prepared, now = found, loop.time()
            attempt_deadline = deadline
            if call.stream and attempts.tries < MAX_ATTEMPTS - 1 and _others_may_answer(candidates, candidate, now):
                attempt_deadline = now + TTFT_SHARE * (deadline - now)
            if hedge_after_seconds is None and prepared.block_source is None:
                upstream = await self._runner.run(call, prepared, attempt_deadline, attempts, floor)
            elif hedge_after_seconds is None:
                run = self._remote_prefill.run_prepared
                upstream = await run(call, prepared, candidate, attempt_deadline, attempts, floor)
            else:
                hedged = HedgedAttempt(self._remote_prefill, call, attempt_deadline, attempts, floor)
                choose = partial(self._choose_hedge, remaining)
                upstream = await hedged.run(prepared, candidate, hedge_after_seconds, choose, permit)
            if upstream is not None:
                return upstream
        return None

    def _choose_hedge(self, remaining: Iterator[Candidate]) -> tuple[Candidate, SlotPermit] | None:
        """The next candidate that may be tried and has a free slot, if the hedge budget allows one more."""
        now = asyncio.get_running_loop().time()
        for candidate in remaining:
            if candidate.deployment.breaker.would_admit(now) and (
                permit := self._fleet.take([candidate.deployment], now)
            ):
                if self._hedge_budget.take():
                    return candidate, permit
                permit.release()
                return None
        return None


def _others_may_answer(candidates: list[Candidate], current: Candidate, now: float) -> bool:
    """Whether a candidate after the current one may be tried now."""
    later = candidates[candidates.index(current) + 1 :]
    return any(each.deployment.breaker.would_admit(now) and each.deployment.has_slot for each in later)


def _capable_first(call: Call, candidates: list[Candidate], now: float) -> list[Candidate]:
    """The candidates in their order, with those last that probably do not support the call."""
    for candidate in candidates:
        if candidate.deployment.missing:
            break
    else:
        return candidates
    features = features_of(call)
    return sorted(candidates, key=lambda candidate: candidate.deployment.missing.affect(features, now))


def _preferred_first(call: Call, candidates: list[Candidate]) -> list[Candidate]:
    """The candidates in their order, with the deployment first that the model's weights chose for the conversation."""
    if call.preferred is None:
        return candidates
    return sorted(candidates, key=lambda candidate: candidate.deployment.entry != call.preferred)


def _remaining(candidates: list[Candidate], attempts: AttemptLog) -> list[Candidate]:
    """The candidates at which the call may still be tried. Raises the request's refusal if it is at fault."""
    if not attempts.errors and not attempts.rejected_at and attempts.refusal is None:
        return candidates  # nothing has failed
    review_errors(attempts)
    remaining = [each for each in candidates if each.deployment.name not in attempts.rejected_at]
    if attempts.refusal is not None and (not remaining or len(attempts.convicted_at) >= CONVICTIONS_TO_REFUSE):
        raise attempts.refusal
    return remaining


def _earliest_retry_at(candidates: list[Candidate]) -> float:
    """When the first of the candidates may be tried again, in event-loop seconds."""
    return min((candidate.deployment.breaker.next_try_at for candidate in candidates), default=0.0)


def _raise_refusal(call: Call, deployments: Sequence[DeploymentState]) -> None:
    """Raise the first deployment's error for a call that no deployment's dialect can express."""
    for deployment in deployments:
        if (refusal := deployment.provider.unsupported_error(call)) is not None:
            raise UpstreamRefused(refusal.status or 400, refusal.body, refusal.content_type)


def _no_answer_error(call: Call, attempts: AttemptLog, candidates: list[Candidate], now: float) -> GatewayError:
    """The error for a call that no deployment answered, with `retry-after` until the first of `candidates` is free."""
    if attempts.refusal is not None:
        return attempts.refusal
    retry_in_seconds = _earliest_retry_at(candidates) - now
    if not attempts.tries:
        ejected = [each.deployment for each in candidates if each.deployment.ejections.reason]
        reasons = "".join(f"; {deployment.name}: {deployment.ejections.reason}" for deployment in ejected)
        return Overloaded(
            f"no deployment of {call.model_name} is available: each one failed, is full, or asked for a pause{reasons}",
            retry_after_seconds=max(retry_in_seconds, BUSY_PAUSE_SECONDS),
        )
    tried = ", ".join(f"{a.deployment} ({a.outcome})" for a in attempts.done)
    kind = UpstreamError
    if attempts.done[-1].outcome in (Fault.TIMEOUT.value, Fault.SILENT.value, OUT_OF_TIME, NOT_SENT):
        kind = UpstreamTimeout
    elif all(attempt.status in BACKOFF_STATUSES for attempt in attempts.done):
        kind = UpstreamBusy
    message = f"no deployment answered: {tried}"
    if attempts.last_error_text:
        message += f"; {attempts.last_error_text}"
    error = kind(message, attempts=attempts.as_error_details())
    if retry_in_seconds > 0:
        error.headers.update(retry_after(retry_in_seconds))
    return error
