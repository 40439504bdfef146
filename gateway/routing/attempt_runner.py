"""Sends one upstream request for a call, waits for its first useful chunk, and records the outcome.

A chunk is useful if it contains output: a role alone is not enough. If the latency class has a `floor`, the output must
also arrive at that rate. Until then the client has received nothing, so the router may try another deployment.

`blame.py` decides what each outcome says about the deployment and about the request.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping

import msgspec

from gateway.core.errors import UpstreamRefused
from gateway.core.first_step import begun
from gateway.core.kv_transfer import PREFILL, load_from
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
        deployment, loop, source = candidate.deployment, attempts.loop, candidate.block_source
        # A prefill deployment has computed the prompt already.
        loads_from = None if source is None or candidate.kv_transfer is not None else source.deployment
        if deployment.estimate.queue.tokens or loads_from is not None:
            await wait_for_shared_prefill(call, deployment, deadline, loads_from)
        request = call
        if call.media is not None and self._media is not None:  # before the deployment's own time begins
            fetched = await _with_media(self._media, call, deployment, attempts)
            if fetched is None:
                return None
            request = fetched
        started = loop.time()
        if not deployment.breaker.would_admit(started):
            return None  # during the wait, other calls failed there, or one of them became its probe
        attempt = _Attempt(call, candidate, attempts, started)
        wait = WaitBound(deadline - started, task=None if in_own_task else attempts.task)
        response: UpstreamResponse | None = None
        followed = REQUEST_PROGRESS.set(attempt)
        try:
            response = await attempt.send(request, wait)
            first = await anext(response)
            if call.stream and (floor is not None or not response.has_output(first)):
                first = await _read_until_output(first, response, floor)
            attempt.outcome = "ok"
        except asyncio.CancelledError:
            attempt.cancelled()
            if not wait.expired:
                raise
            wait.uncancel()  # the wait's own time limit cancelled the task
            attempt.timed_out(loop.time())
        except TimeoutError:
            attempt.outcome = TOO_SLOW
        except StopAsyncIteration:
            attempt.failed(ProviderFailure(Fault.CUT, "the response ended before its first output"))
        except ProviderFailure as failure:
            attempt.failed(failure)
            attempts.note_error(deployment, failure)
            if failure.fault is Fault.REFUSED:
                raise UpstreamRefused(
                    failure.status or 400, failure.body, failure.content_type, reason=failure.reason
                ) from None
        finally:  # on every way out, cancellation included
            wait.close()
            REQUEST_PROGRESS.reset(followed)
            ended = loop.time()
            attempt.record(ended)
            if attempt.outcome != "ok" and response is not None:
                await response.aclose()
        if attempt.failure is not None and attempt.failure.fault is Fault.CUT:
            attempts.crashes += await record_lost_connection(self._quarantine, deployment, call, started)
        if attempt.outcome != "ok":
            return None
        assert response is not None
        self._learn_first_chunk(call, attempt.sent, started, ended)
        return Upstream(call, candidate, attempt.sent, response, first, attempts, self._quarantine)

    def _learn_first_chunk(self, call: Call, sent: SentCall, started: float, now: float) -> None:
        """Record the time to the first chunk: for outlier detection, the prefill rate and the hedge delay."""
        if call.stream:
            sent.deployment.first_chunks.append((now, now - started))
        sent.first_chunk(now)
        if call.latency_class.hedge is not None:
            self._hedge_budget.record_first_chunk(call.model_name, call.stream, now - started)


class _Attempt:
    """One attempt: sends its request, and records what its outcome says about the deployment and the request."""

    __slots__ = (
        "_attempts", "_call", "_candidate", "_computing_before", "_deployment", "_span_id", "_started",
        "_started_ns", "_was_probe", "failure", "outcome", "sent", "unsent",
    )  # fmt: skip

    def __init__(self, call: Call, candidate: Candidate, attempts: AttemptLog, started: float) -> None:
        """Open the attempt in the ledger. Raises `LedgerUnavailable`; then nothing may be sent."""
        deployment = candidate.deployment
        self._computing_before = attempts.last_deployment
        attempts.begin(deployment)
        self._call = call
        self._candidate = candidate
        self._deployment = deployment
        self._attempts = attempts
        self._started = started
        self._span_id, self._started_ns = attempts.new_span_id(), attempts.now_ns()
        self._was_probe = deployment.breaker.open
        deployment.breaker.admit(started)
        deployment.last_contact_at = started
        self.sent: SentCall
        self.unsent = False  # no byte of the request has been sent yet (`gateway.providers.request_progress`)
        attempts.newest = self
        self.outcome = GIVEN_UP
        self.failure: ProviderFailure | None = None

    def send(self, request: Call, wait: WaitBound) -> Awaitable[UpstreamResponse]:
        """Send the request. The response comes when its head has arrived. Raises `ProviderFailure`, also when awaited.

        On an idle connection the request is sent at once, and its estimates are updated while the deployment works.
        """
        deployment, source = self._deployment, self._candidate.block_source
        headers = self._attempts.headers(self._span_id)
        if deployment.cache_slots is None and source is None and not request.large:
            wait.begin()
            try:
                return begun(deployment.provider.open(request, headers=headers))
            finally:
                self._note_sent()
        sent = self._note_sent()
        if source is not None:
            params, kept_tokens = self._candidate.kv_transfer, None
            if source.prediction is not None:
                kept_tokens = sent.expect_loaded(source.deployment, source.prediction.matched, moves=params is None)
            params = params or load_from(source.deployment.config.base_url, kept_tokens)
            request = msgspec.structs.replace(request, kv_transfer=params)
        if sent.cache_slot is not None:
            request = msgspec.structs.replace(request, cache_slot=sent.cache_slot)
        if request.large:
            return self._send_large(request, headers, wait)
        wait.begin()
        return deployment.provider.open(request, headers=headers)

    def _note_sent(self) -> SentCall:
        """Record the call in the estimates of the deployment."""
        call, prediction = self._call, self._candidate.prediction
        streams = call.stream or call.kv_transfer is PREFILL  # whose answer comes when the prompt is computed
        self.sent = self._deployment.send(call, self._started, streams=streams, prediction=prediction)
        return self.sent

    async def _send_large(self, request: Call, headers: Mapping[str, str], wait: WaitBound) -> UpstreamResponse:
        provider = self._deployment.provider
        self.unsent = True
        body = await in_thread(provider.render, request)
        self.unsent = False
        wait.begin()  # the deployment's time begins after the gateway's own work
        return await provider.open(request, headers=headers, body=body)

    def cancelled(self) -> None:
        """The attempt's task was cancelled, by its creator or at its time limit."""
        self.outcome = NOT_SENT if self.unsent else self._attempts.outcome_if_cancelled
        if self.unsent:  # this deployment cannot have computed anything
            self._attempts.last_deployment = self._computing_before

    def timed_out(self, now: float) -> None:
        """The cancellation was that of the attempt's own time limit."""
        unsent = self.unsent
        self.outcome = NOT_SENT if unsent else OUT_OF_TIME
        if failure := _timeout_failure(self._call, now - self._started, unsent=unsent):
            self.failed(failure)

    def failed(self, failure: ProviderFailure) -> None:
        """The attempt failed before its first output."""
        self.failure, self.outcome = failure, failure.outcome

    def record(self, now: float) -> None:
        """Apply the outcome to the deployment, and append the attempt to the call's log. Call it once."""
        deployment, attempts, failure = self._deployment, self._attempts, self.failure
        if attempts.newest is self:
            attempts.newest = None  # otherwise they would form a cycle
        if self.outcome == "ok":
            status: int | None = 200
            record_answer(self._call, deployment, attempts, now)
        else:
            if failure is None or failure.fault is Fault.REFUSED:
                deployment.breaker.abandoned()
            else:
                was_probe = self._was_probe
                record_failure(
                    self._call, deployment, failure, attempts, sent_at=self._started, was_probe=was_probe, now=now
                )
            status = None if failure is None else failure.status
            self.sent.end(now, answered=False)
        attempts.add(self.sent, self.outcome, self._started_ns, self._span_id, status)


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
