"""One finished request as telemetry sees it, and how its timings become phases."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import msgspec

from gateway.telemetry import names
from gateway.types import Attempt, Call, Operation, Outcome, PhaseTimings, Principal, Trace, Usage


class RouteChoice(Protocol):
    @property
    def reason(self) -> str:
        """In words, which cost something to make."""


class CallRecord(msgspec.Struct, kw_only=True):
    """Filled while the request runs, handed to `Telemetry.record` once after its reply.

    What a request never came to stays at its default: one without a valid key has neither principal nor call.
    Nothing here holds a key or a message, and `call.fields` is read for numbers only.
    """

    call_id: str  # as the client is told it
    trace: Trace
    server_span_id: int
    timings: PhaseTimings
    method: str
    path: str  # of the door, never what a client made up: it becomes a span's name
    status: int = 500
    operation: Operation | None = None
    principal: Principal | None = None
    call: Call | None = None
    outcome: Outcome | None = None  # None: refused here, before any upstream was asked
    error_code: str | None = None
    cache: str = "off"  # hit, shared, miss, off
    route_choice: RouteChoice | None = None  # by the router
    attempts: Sequence[Attempt] = ()
    deployment: str | None = None  # the one that answered
    usage: Usage | None = None
    response_id: str | None = None
    finish_reasons: Sequence[str] = ()
    event_id: str | None = None  # of the receipt

    @property
    def route_reason(self) -> str | None:
        """Why that deployment, in the words of the router."""
        return None if self.route_choice is None else self.route_choice.reason

    @property
    def predicted_cached_tokens(self) -> int:
        """What the router expected of the deployment that answered."""
        return predicted_cached_tokens(self.attempts, self.deployment)


def predicted_cached_tokens(attempts: Sequence[Attempt], deployment: str | None) -> int:
    """As the router expected them of this deployment, where it was asked last."""
    for attempt in reversed(attempts):
        if attempt.deployment == deployment:
            return attempt.predicted_cached_tokens
    return 0


class Times(msgspec.Struct, frozen=True):
    """What the metrics want to know of a request's time, in nanoseconds. None: it never came to that."""

    whole: int
    own: int  # the gateway's: neither in the queue, nor with the upstreams, nor replaying an answer
    queued: int | None
    chat: int | None


class Phase(NamedTuple):
    name: str
    start_ns: int
    end_ns: int
    within_chat: bool = False

    @property
    def seconds(self) -> float:
        return (self.end_ns - self.start_ns) / 1e9


def phases(timings: PhaseTimings, attempts: Sequence[Attempt]) -> list[Phase]:
    """The request's time, cut at the timings; those not `within_chat` cover it without gap or overlap.

    The first phase begins with the request and each lasts until the next. `chat` is the whole dialogue with the
    upstreams: from the first attempt, which `route` starts, up to `settle`; whatever is entered meanwhile (the
    queue of a fallback model, say) lies within it. A `chat` mark before any attempt is the replay of an answer.
    """
    entered = _intervals(timings)
    if not attempts or not entered:
        return [_replay(*phase) for phase in entered]

    opened, settled = _chat(timings, entered, attempts)
    result = [Phase(names.CHAT_PHASE, opened, settled)]
    for name, start, end in entered:
        if start < opened or (start == opened and name != names.CHAT_PHASE):
            result.append(_replay(name, start, min(end, opened)))
        elif name != names.CHAT_PHASE:
            result.append(Phase(name, start, end, within_chat=start < settled))
    result.sort(key=_start)
    return result


def times(timings: PhaseTimings, attempts: Sequence[Attempt]) -> Times:
    """The sums over `phases`, for the many requests of which nobody draws a span."""
    at = dict(timings.phases)
    if attempts and at.keys() >= _ORDINARY and len(at) == len(timings.phases):  # each was entered, and once
        started, ended, queue, route = (
            timings.started_ns,
            timings.ended_ns,
            at[names.QUEUE_PHASE],
            at[names.ROUTE_PHASE],
        )
        opened, settled = attempts[0].started_ns, at[names.SETTLE_PHASE]
        relayed = at[names.CHAT_PHASE]
        if len(attempts) == 1 and started <= queue <= route <= opened < relayed <= settled <= ended:
            waited = route - queue
            return Times(ended - started, opened - started - waited + ended - settled, waited, settled - opened)
    return _summed(phases(timings, attempts), timings)


def _summed(found: Sequence[Phase], timings: PhaseTimings) -> Times:
    own, queued, chat = 0, None, None
    for phase in found:
        lasted = phase.end_ns - phase.start_ns
        if phase.name == names.QUEUE_PHASE:
            queued = lasted if queued is None else queued + lasted
        elif phase.name == names.CHAT_PHASE:
            chat = lasted
        elif phase.name != names.REPLAY_SPAN and not phase.within_chat:
            own += lasted
    ended = found[-1].end_ns if found else max(timings.ended_ns, timings.started_ns)
    return Times(ended - timings.started_ns, own, queued, chat)


def _chat(
    timings: PhaseTimings, entered: Sequence[tuple[str, int, int]], attempts: Sequence[Attempt]
) -> tuple[int, int]:
    """When the dialogue with the upstreams begins and ends."""
    settled, opened = entered[-1][2], None
    for name, start, _ in entered:  # of a phase that was entered twice, the last time counts
        if name == names.CHAT_PHASE:
            opened = start
        elif name == names.SETTLE_PHASE:
            settled = start
    if opened is None:
        opened = settled
    for attempt in attempts:
        if attempt.started_ns < opened:
            opened = attempt.started_ns
    return max(timings.started_ns, opened), settled


def _intervals(timings: PhaseTimings) -> list[tuple[str, int, int]]:
    """(phase, start, end) as they were entered, each until the next; the clock may have been set back meanwhile."""
    intervals: list[tuple[str, int, int]] = []
    entered, start = timings.phases, timings.started_ns
    if not entered:
        return intervals
    name = entered[0][0]
    for next_name, ns in entered[1:]:
        end = ns if ns > start else start
        intervals.append((name, start, end))
        name, start = next_name, end
    intervals.append((name, start, max(timings.ended_ns, start)))
    return intervals


def _replay(name: str, start_ns: int, end_ns: int) -> Phase:
    """The `chat` mark before any attempt: an answer from the cache, or from another call's upstream."""
    return Phase(names.REPLAY_SPAN if name == names.CHAT_PHASE else name, start_ns, end_ns)


_start = operator.itemgetter(1)
_ORDINARY = frozenset((names.QUEUE_PHASE, names.ROUTE_PHASE, names.CHAT_PHASE, names.SETTLE_PHASE))
