"""Applies the outcome of each attempt to its deployment and to its request, by the rules of `deployments/evidence.py`.

`record_answer` and `record_failure` are called once for each attempt, `record_broken_stream` if a response breaks off
after its first output, and `record_completion` if it is complete. They update the circuit breaker, the evidence, the
missing capabilities, the quarantine and the failure log of the deployment, and note in the call's attempt log what
the router must know: where the call must not be tried again, and which error the client gets.
"""

from __future__ import annotations

import asyncio

from gateway.core.errors import QuarantinedRequest, UpstreamRefused
from gateway.deployments.evidence import Quarantine, Verdict, fingerprint_of
from gateway.deployments.state import DeploymentState
from gateway.providers.base import Fault, ProviderFailure
from gateway.routing.attempt_log import AttemptLog, OpenError
from gateway.types import Call

DEFAULT_REST_SECONDS = 1.0  # after a 429 without `Retry-After`
BACKOFF_STATUSES = frozenset({429, 503})
# Overloaded, or a proxy's error: says little about the request, which is therefore not refused for it.
_UNAVAILABLE_STATUSES = frozenset({502, 503, 504, *range(520, 531)})
_DEPLOYMENT_FAULTS = frozenset({Fault.CONNECT, Fault.TIMEOUT, Fault.CUT, Fault.MALFORMED})


def record_answer(call: Call, deployment: DeploymentState, attempts: AttemptLog, now: float) -> None:
    """The deployment sent its first output. Deployments that failed at the same request before are at fault."""
    deployment.breaker.succeeded(now)
    deployment.evidence.succeeded(now)
    deployment.missing.answered(call)
    if deployment.ejections.reason:
        deployment.ejections.end()
    deployment.failures.breaker_changed(deployment.breaker.open, now)
    if attempts.errors:
        for error in attempts.errors:
            if error.deployment is not deployment:
                _convict(call, error, now)
        attempts.errors.clear()


def _convict(call: Call, error: OpenError, now: float) -> None:
    """Another deployment answered the request at which this one failed."""
    deployment = error.deployment
    deployment.breaker.convicted(now, was_probe=error.was_probe)
    _log_breaker(deployment, now)


def record_failure(
    call: Call,
    deployment: DeploymentState,
    failure: ProviderFailure,
    attempts: AttemptLog,
    *,
    sent_at: float,
    was_probe: bool,
    now: float,
) -> None:
    """An attempt failed before its first output."""
    fault, evidence = failure.fault, deployment.evidence
    if fault is Fault.CONNECT or failure.status == 503:
        evidence.refused_connection(now)
    if _rests(deployment, failure, now):
        _log_failure(call, deployment, failure, now)
    elif fault is Fault.SETUP and not (failure.status == 403 and evidence.has_standing(now)):
        _eject(call, deployment, failure, attempts, now)
    elif fault is Fault.SILENT:  # perhaps all are busy: it counts if another deployment answers
        attempts.errors.append(OpenError(deployment, sent_at, was_probe, False, _refusal(failure)))
        deployment.breaker.suspected(now)
        _log_failure(call, deployment, failure, now)
    elif fault is Fault.UNSUPPORTED:
        deployment.breaker.abandoned()
        reject(deployment, failure, attempts)
        if (failure.status or 0) >= 500:
            deployment.missing.add(call, now)
    elif fault is Fault.SETUP or (fault is Fault.STATUS and (failure.status or 0) >= 500):
        _judge(call, deployment, failure, attempts, sent_at, was_probe, now)
    elif fault in _DEPLOYMENT_FAULTS:
        _count(call, deployment, failure, now)
    else:  # our own bounds, or a retryable 4xx
        deployment.breaker.abandoned()
        if fault is not Fault.POOL:
            _log_failure(call, deployment, failure, now)
    _log_breaker(deployment, now)


def _rests(deployment: DeploymentState, failure: ProviderFailure, now: float) -> bool:
    """Let an overloaded deployment rest for the time that it asked for; after a 429 without a time, for the default."""
    if failure.status not in BACKOFF_STATUSES or (failure.status == 503 and failure.retry_after_seconds is None):
        return False
    seconds = DEFAULT_REST_SECONDS if failure.retry_after_seconds is None else failure.retry_after_seconds
    deployment.breaker.rest(now, seconds)
    return True


def _eject(call: Call, deployment: DeploymentState, failure: ProviderFailure, attempts: AttemptLog, now: float) -> None:
    """Rule 4: what the gateway wrote is wrong, so every request would fail."""
    seconds = deployment.ejections.eject(failure.log_message)
    deployment.breaker.eject(now, seconds)
    deployment.failures.ejected(failure.log_message, seconds, call.id)
    attempts.rejected_at.add(deployment.name)


def _judge(
    call: Call,
    deployment: DeploymentState,
    failure: ProviderFailure,
    attempts: AttemptLog,
    sent_at: float,
    was_probe: bool,
    now: float,
) -> None:
    """Rules 1 to 3: an error answer, for which the request or the deployment may be at fault."""
    breaker = deployment.breaker
    verdict = deployment.evidence.judge_error(fingerprint_of(call), sent_at, now)
    may_be_request = failure.status not in _UNAVAILABLE_STATUSES
    if verdict is Verdict.REQUEST and may_be_request:
        breaker.abandoned()
        attempts.convicted_at.add(deployment.name)
        reject(deployment, failure, attempts)
        return
    _log_failure(call, deployment, failure, now)
    if may_be_request and any(error.deployment is deployment for error in attempts.errors):
        attempts.rejected_at.add(deployment.name)  # it was tried twice
    attempts.errors.append(OpenError(deployment, sent_at, was_probe, may_be_request, _refusal(failure)))
    if verdict is Verdict.DEPLOYMENT:
        breaker.convicted_by_many(now)
    else:
        breaker.suspected(now)


def reject(deployment: DeploymentState, failure: ProviderFailure, attempts: AttemptLog) -> None:
    """The deployment cannot serve the call. If no other one can, the client gets the first such error."""
    attempts.rejected_at.add(deployment.name)
    attempts.refusal = attempts.refusal or _refusal(failure)


def _refusal(failure: ProviderFailure) -> UpstreamRefused:
    return UpstreamRefused(failure.status or 502, failure.body, failure.content_type)


def _count(call: Call, deployment: DeploymentState, failure: ProviderFailure, now: float) -> None:
    """A failure of the connection or of the protocol counts, but not again for one request while others succeed."""
    is_repetition = deployment.evidence.is_repetition(fingerprint_of(call), now)
    if is_repetition and failure.fault is not Fault.CONNECT:
        deployment.breaker.suspected(now)
    else:
        deployment.breaker.failed(now)
    _log_failure(call, deployment, failure, now)


def review_errors(attempts: AttemptLog) -> None:
    """Judge the call's open errors again: other requests may have succeeded at those deployments since."""
    for error in attempts.errors:
        name, evidence = error.deployment.name, error.deployment.evidence
        if error.may_be_request and evidence.last_success_at >= error.sent_at and name not in attempts.convicted_at:
            attempts.convicted_at.add(name)
            attempts.rejected_at.add(name)
            attempts.refusal = attempts.refusal or error.refusal


async def record_broken_stream(
    quarantine: Quarantine, deployment: DeploymentState, call: Call, failure: ProviderFailure, began_at: float
) -> bool:
    """A response broke off after its first output. True if the deployment crashed."""
    now = asyncio.get_running_loop().time()
    deployment.failures.failed(failure.fault.value, f"mid-stream: {failure.log_message}", call.id, now)
    reported = bool(failure.upstream_message)  # if the deployment reported an error, it did not crash
    if not deployment.evidence.acquits_of_break(fingerprint_of(call), began_at, now, reported=reported):
        deployment.breaker.answer_broken(now)
    _log_breaker(deployment, now)
    if failure.fault is not Fault.CUT or reported:
        return False
    return await record_lost_connection(quarantine, deployment, call, began_at)


async def record_lost_connection(
    quarantine: Quarantine, deployment: DeploymentState, call: Call, sent_at: float
) -> bool:
    """Rule 6: a connection was lost while the deployment processed a call. True if the deployment crashed.

    A health check distinguishes a crash from a broken connection.
    """
    cut_at = asyncio.get_running_loop().time()
    if deployment.evidence.was_shutting_down(sent_at, cut_at) or await deployment.provider.healthy():
        return False
    quarantine.crashed(fingerprint_of(call), deployment.shared_id, asyncio.get_running_loop().time())
    return True


def record_completion(quarantine: Quarantine, deployment: DeploymentState, call: Call, now: float) -> None:
    """A response is complete: trust the deployment again, and forget the request's crashes."""
    deployment.breaker.completed()
    deployment.evidence.completed(now)
    if quarantine.records:  # free while no deployment has crashed
        quarantine.succeeded(fingerprint_of(call))


def raise_if_quarantined(quarantine: Quarantine, call: Call, now: float) -> None:
    """Raise `QuarantinedRequest` if the request is blocked. The error is the same for all tenants."""
    if quarantine.records and quarantine.is_blocked(fingerprint_of(call), now):
        raise QuarantinedRequest(
            "deployments crashed while they processed this request, so it is not sent to another one for now"
        )


def _log_failure(call: Call, deployment: DeploymentState, failure: ProviderFailure, now: float) -> None:
    deployment.failures.failed(failure.outcome, failure.log_message, call.id, now)


def _log_breaker(deployment: DeploymentState, now: float) -> None:
    deployment.failures.breaker_changed(deployment.breaker.open, now)
