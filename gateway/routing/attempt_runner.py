"""One server asked for one answer, up to its first useful chunk; and what its failure says of it.

Useful is what commits to something: a role alone does not, and where the class has a floor, neither does output that
comes slower than that. Until then nothing has been sent, and another server may be asked.
"""

from __future__ import annotations

import asyncio

import msgspec

from gateway.core.errors import UpstreamRefused
from gateway.core.timers import WaitBound
from gateway.deployments.fleet import DeploymentState, SentCall
from gateway.deployments.quarantine import Quarantine
from gateway.policy import Floor
from gateway.providers.base import Fault, ProviderFailure, UpstreamResponse
from gateway.providers.sse import count_events, ends_stream, has_output
from gateway.routing.attempt_log import GIVEN_UP, OUT_OF_TIME, TOO_SLOW, AttemptLog
from gateway.routing.base import Candidate
from gateway.routing.hedging import HedgeBudget
from gateway.routing.quarantine_checks import record_cut_answer
from gateway.routing.shared_prefill import wait_for_shared_prefill
from gateway.routing.upstream import Upstream
from gateway.types import Call

MAX_OPENING_BYTES = 256 * 1024  # of frames without output that are held back before the first with some
DEFAULT_REST_SECONDS = 1.0  # of a 429 that says no time
BACKOFF_STATUSES = frozenset({429, 503})
CUT = Fault.CUT.value
DEPLOYMENT_FAULTS = frozenset(f.value for f in (Fault.CONNECT, Fault.TIMEOUT, Fault.CUT, Fault.MALFORMED))
_NOT_DEPLOYMENT_FAULTS = frozenset({Fault.REFUSED.value, OUT_OF_TIME})
FULL_WAIT_SHARE = 0.9  # of the class limit: a deployment that had less time is not at fault


class AttemptRunner:
    """Asks servers, and tells breakers, suspects and hedging what came of it."""

    def __init__(self, quarantine: Quarantine, hedging: HedgeBudget) -> None:
        self._quarantine = quarantine
        self._hedging = hedging

    async def run(
        self,
        call: Call,
        candidate: Candidate,
        deadline: float,
        attempts: AttemptLog,
        floor: Floor | None,
        *,
        in_own_task: bool = False,
    ) -> Upstream | None:
        """The server's answer, or None where another is to be asked. Raises `UpstreamRefused` where it speaks for all.

        `deadline`: of the first chunk, in event-loop seconds. `racing`: in a task of its own, which whoever started it
        may cancel.
        """
        deployment, loop = candidate.deployment, asyncio.get_running_loop()
        await wait_for_shared_prefill(call, deployment, deadline)
        started = loop.time()
        if not deployment.breaker.would_admit(started):
            return None  # meanwhile it has failed others, or one of them has become its probe
        attempts.begin(deployment)
        span_id, started_ns = attempts.new_span_id(), attempts.now_ns()
        reply: UpstreamResponse | None = None
        deployment.breaker.admit(started)
        deployment.last_contact_at = started
        sent = deployment.send(call, started, streams=call.stream, prediction=candidate.prediction)
        wait = WaitBound(deadline - started, task=None if in_own_task else attempts.task)
        wait.begin()
        outcome, status, why = GIVEN_UP, None, ""
        try:
            request = call if sent.cache_slot is None else msgspec.structs.replace(call, cache_slot=sent.cache_slot)
            reply = await deployment.provider.open(request, headers=attempts.headers(span_id))
            first = await anext(reply)
            if call.stream and (floor is not None or not has_output(first)):
                first = await _read_until_output(first, reply, floor)
            outcome, status = "ok", 200
        except asyncio.CancelledError:
            if not wait.expired:
                outcome = attempts.outcome_if_cancelled
                raise
            wait.uncancel()
            waited = loop.time() - started
            outcome, why = _timeout_outcome(call, waited), f"nothing useful came for {waited:.1f} s"
        except TimeoutError:
            outcome = TOO_SLOW
        except StopAsyncIteration:
            outcome, why = CUT, "the answer ended before it had begun"
        except ProviderFailure as failure:
            outcome, status, why = _outcome(failure), failure.status, failure.log_message
            attempts.last_error_text = (
                f"{deployment.name} says: {failure.upstream_message}" if failure.upstream_message else ""
            )
            if failure.fault is not Fault.CUT:
                attempts.last_deployment = None
            if failure.fault is Fault.REFUSED:
                raise UpstreamRefused(failure.status or 400, failure.body, failure.content_type) from None
            _apply_retry_after(deployment, failure, loop.time())
        finally:
            wait.close()
            ended = loop.time()
            if outcome == CUT:
                deployment.record_cut(ended)
            if why and outcome not in _NOT_DEPLOYMENT_FAULTS:
                deployment.failures.failed(outcome, why, call.id, ended)
            _record_outcome(deployment, outcome, status, ended)
            if outcome != "ok":
                sent.end(ended, answered=False)
                attempts.add(sent, outcome, started_ns, span_id, status)
                if reply is not None:
                    await reply.aclose()
        if outcome == CUT:
            await record_cut_answer(self._quarantine, deployment, call)
        if outcome != "ok":
            return None
        assert reply is not None
        self._learn_first_chunk(call, sent, started, ended)
        attempts.add(sent, outcome, started_ns, span_id, status)
        return Upstream(call, candidate, sent, reply, first, attempts.task, self._quarantine)

    def _learn_first_chunk(self, call: Call, sent: SentCall, started: float, now: float) -> None:
        """From how long a first chunk took."""
        if call.stream:
            sent.deployment.first_chunks.append((now, now - started))
        sent.first_chunk(now)
        if call.latency_class.hedge is not None:
            self._hedging.record_first_chunk(call.model.name, call.stream, now - started)


async def _read_until_output(first: bytes, reply: UpstreamResponse, floor: Floor | None) -> bytes:
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


def _timeout_outcome(call: Call, seconds: float) -> str:
    """Whose fault it is that nothing came for so long."""
    limit_seconds = call.latency_class.ttft if call.stream else call.latency_class.total
    return Fault.TIMEOUT.value if seconds >= FULL_WAIT_SHARE * limit_seconds else OUT_OF_TIME


def _outcome(failure: ProviderFailure) -> str:
    return f"status_{failure.status}" if failure.fault is Fault.STATUS else failure.fault.value


def _record_outcome(deployment: DeploymentState, outcome: str, status: int | None, now: float) -> None:
    """Only what is the server's fault counts against it: not a refused request, our own bounds, or a client's."""
    if outcome == "ok":
        deployment.breaker.succeeded(now)
    elif outcome in DEPLOYMENT_FAULTS or (status is not None and status >= 500):
        deployment.breaker.failed(now)
    else:
        deployment.breaker.abandoned()
    deployment.failures.breaker_changed(deployment.breaker.open, now)


def _apply_retry_after(deployment: DeploymentState, failure: ProviderFailure, now: float) -> None:
    """A server that has too much to do says for how long it wants to be left alone, or at least that it does."""
    if failure.status in BACKOFF_STATUSES and (failure.status == 429 or failure.retry_after_seconds is not None):
        seconds = DEFAULT_REST_SECONDS if failure.retry_after_seconds is None else failure.retry_after_seconds
        deployment.breaker.rest(now, seconds)
