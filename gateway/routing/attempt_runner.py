"""Sends one upstream request for a call, waits for its first useful chunk, and records the outcome.

A chunk is useful if it contains output: a role alone is not enough. If the latency class has a `floor`, the output must
also arrive at that rate. Until then the client has received nothing, so the router may try another deployment.

`blame.py` decides what each outcome says about the deployment and about the request.
"""

from __future__ import annotations

import asyncio

import msgspec

from gateway.core.errors import UpstreamRefused
from gateway.core.timers import WaitBound, time_bound
from gateway.core.worker_thread import in_thread
from gateway.deployments.evidence import Quarantine
from gateway.deployments.sent_call import SentCall
from gateway.deployments.state import DeploymentState
from gateway.policy import Floor
from gateway.providers.base import Fault, ProviderFailure, UpstreamResponse
from gateway.providers.media_fetch.base import MediaSource
from gateway.providers.request_progress import REQUEST_PROGRESS
from gateway.providers.sse import count_events
from gateway.routing.attempt_log import GIVEN_UP, NOT_SENT, OUT_OF_TIME, TOO_SLOW, AttemptLog
from gateway.routing.base import Candidate
from gateway.routing.blame import record_answer, record_failure, record_lost_connection, reject
from gateway.routing.hedge_budget import HedgeBudget
from gateway.routing.shared_prefill import wait_for_shared_prefill
from gateway.routing.upstream import Upstream
from gateway.types import Call

MAX_OPENING_BYTES = 256 * 1024  # of events without output, held back until one has output
TTFT_SHARE = 0.5  # of the time left to the first chunk, that a stream's attempt gets if another deployment is left
FULL_WAIT_SHARE = 0.9  # of the class limit: a deployment that had less time is not at fault


class AttemptRunner:
    """Runs attempts. Shared by all calls; owned by the event loop."""

    def __init__(self, quarantine: Quarantine, hedge_budget: HedgeBudget, media: MediaSource | None = None) -> None:
        self._media = media
        self._quarantine = quarantine
        self._hedge_budget = hedge_budget

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
        """Attempt the call at one deployment. Returns None if the router should try another one.

        Raises `UpstreamRefused` if the deployment rejected the request itself, and `LedgerUnavailable`. `deadline` is
        the event-loop time by which the first chunk must arrive. `in_own_task` is True if the attempt runs in a task of
        its own, which its creator may cancel; otherwise it runs in the call's task.
        """
        deployment, loop = candidate.deployment, asyncio.get_running_loop()
        if deployment.estimate.prefill_tokens_queued:
            await wait_for_shared_prefill(call, deployment, deadline)
        request = call
        if call.media is not None and self._media is not None:  # before the deployment's own time begins
            fetched = await _with_media(self._media, call, deployment, attempts)
            if fetched is None:
                return None
            request = fetched
        started = loop.time()
        if not deployment.breaker.would_admit(started):
            return None  # during the wait, other calls failed there, or one of them became its probe
        computing_before = attempts.last_deployment
        attempts.begin(deployment)
        span_id, started_ns = attempts.new_span_id(), attempts.now_ns()
        response: UpstreamResponse | None = None
        was_probe = deployment.breaker.open
        deployment.breaker.admit(started)
        deployment.last_contact_at = started
        sent = deployment.send(call, started, streams=call.stream, prediction=candidate.prediction)
        attempts.newest = sent
        wait = WaitBound(deadline - started, task=None if in_own_task else attempts.task)
        outcome, failed = GIVEN_UP, None
        followed = REQUEST_PROGRESS.set(sent)
        try:
            if sent.cache_slot is not None:
                request = msgspec.structs.replace(request, cache_slot=sent.cache_slot)
            headers, provider = attempts.headers(span_id), deployment.provider
            # The deployment's time begins after the gateway's own work.
            body = None
            if request.large:
                sent.unsent = True
                body = await in_thread(provider.render, request)
                sent.unsent = False
            wait.begin()
            opening = (
                provider.open(request, headers=headers, body=body) if body else provider.open(request, headers=headers)
            )
            response = await opening
            first = await anext(response)
            if call.stream and (floor is not None or not response.has_output(first)):
                first = await _read_until_output(first, response, floor)
            outcome = "ok"
        except asyncio.CancelledError:
            if sent.unsent:  # this deployment cannot have computed anything
                attempts.last_deployment = computing_before
            if not wait.expired:
                outcome = NOT_SENT if sent.unsent else attempts.outcome_if_cancelled
                raise
            wait.uncancel()  # the wait's own time limit cancelled the task
            outcome = NOT_SENT if sent.unsent else OUT_OF_TIME
            failed = _timeout_failure(call, loop.time() - started, unsent=sent.unsent)
        except TimeoutError:
            outcome = TOO_SLOW
        except StopAsyncIteration:
            failed = ProviderFailure(Fault.CUT, "the response ended before its first output")
        except ProviderFailure as failure:
            failed = failure
            attempts.note_error(deployment, failure)
            if failure.fault is Fault.REFUSED:
                outcome = failure.outcome
                raise UpstreamRefused(
                    failure.status or 400, failure.body, failure.content_type, reason=failure.reason
                ) from None
        finally:  # on every way out, cancellation included
            wait.close()
            REQUEST_PROGRESS.reset(followed)
            ended = loop.time()
            if failed is not None:
                outcome = failed.outcome
            if outcome == "ok":
                record_answer(call, deployment, attempts, ended)
            elif failed is None or failed.fault is Fault.REFUSED:
                deployment.breaker.abandoned()
            else:
                record_failure(call, deployment, failed, attempts, sent_at=started, was_probe=was_probe, now=ended)
            if outcome != "ok":
                sent.end(ended, answered=False)
                attempts.add(sent, outcome, started_ns, span_id, failed.status if failed is not None else None)
                if response is not None:
                    await response.aclose()
        if failed is not None and failed.fault is Fault.CUT:
            attempts.crashes += await record_lost_connection(self._quarantine, deployment, call, started)
        if outcome != "ok":
            return None
        assert response is not None
        self._learn_first_chunk(call, sent, started, ended)
        attempts.add(sent, outcome, started_ns, span_id, 200)
        return Upstream(call, candidate, sent, response, first, attempts.task, self._quarantine)

    def _learn_first_chunk(self, call: Call, sent: SentCall, started: float, now: float) -> None:
        """Record the time to the first chunk: for outlier detection, the prefill rate and the hedge delay."""
        if call.stream:
            sent.deployment.first_chunks.append((now, now - started))
        sent.first_chunk(now)
        if call.latency_class.hedge is not None:
            self._hedge_budget.record_first_chunk(call.model_name, call.stream, now - started)


async def _with_media(
    source: MediaSource, call: Call, deployment: DeploymentState, attempts: AttemptLog
) -> Call | None:
    """Return the call with the media that the deployment needs as data. If that fails, reject the deployment."""
    try:
        return await source.with_data(call, deployment.provider.media_to_fetch(call))
    except ProviderFailure as failure:
        reject(deployment, failure, attempts)
        return None


async def _read_until_output(first: bytes, response: UpstreamResponse, floor: Floor | None) -> bytes:
    """`first` and the chunks after it, up to the first output. With a floor, up to the floor's number of events.

    Raises `TimeoutError` if they arrive more slowly than the floor demands.
    """
    while not response.has_output(first) and len(first) < MAX_OPENING_BYTES:
        first += await anext(response)
    if floor is not None:
        async with time_bound(floor.within):
            while count_events(first) < floor.chunks and not response.ends_stream(first):
                first += await anext(response)
    return first


def _timeout_failure(call: Call, seconds: float, *, unsent: bool) -> ProviderFailure | None:
    """The deployment's failure after a timeout; None if the timeout says nothing about the deployment."""
    fault = _timeout_fault(call, seconds)
    if fault is None:
        return None
    if unsent:
        return ProviderFailure(Fault.CONNECT, f"no connection within {seconds:.1f} s")
    return ProviderFailure(fault, f"no output within {seconds:.1f} s")


def _timeout_fault(call: Call, seconds: float) -> Fault | None:
    """What a timeout after `seconds` says about the deployment; None if it says nothing.

    The deployment is at fault if it had the time that the class allows. With its share of that time, it is at fault if
    another deployment then answers. It had less if the client's own deadline was shorter, or if earlier attempts used
    up the time.
    """
    limit_seconds = call.latency_class.ttft if call.stream else call.latency_class.total
    if seconds >= FULL_WAIT_SHARE * limit_seconds:
        return Fault.TIMEOUT
    return Fault.SILENT if call.stream and seconds >= FULL_WAIT_SHARE * TTFT_SHARE * limit_seconds else None
