"""`CallRecord`: the data of a finished request for telemetry. Also computes the request's phases from `PhaseTimings`.

`PhaseTimings` has the time at which each phase was entered. `phases` turns these times into intervals, from which spans
and the dashboard's waterfall are made. `times` computes only the sums that metrics need, with a fast path for the usual
sequence of phases with one attempt.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple, Protocol

import msgspec

from gateway.telemetry import names
from gateway.types import Attempt, Call, Operation, Outcome, PhaseTimings, Principal, Trace, Usage


class RouteChoice(Protocol):
    """The router's choice of a deployment."""

    @property
    def reason(self) -> str:
        """Why it was chosen, as text. Made on demand, since formatting it costs time."""


class CallRecord(msgspec.Struct, kw_only=True):
    """The data of one request for telemetry. Filled while the request runs, and recorded once after the reply.

    Fields of phases that the request did not reach keep their defaults: without a valid key there is neither principal
    nor call. The record contains no key and no message, except in `call.fields`. Only numbers are read from there.
    """

    call_id: str  # as sent to the client
    trace: Trace
    server_span_id: int
    timings: PhaseTimings
    method: str
    path: str  # of the endpoint, not the client's text: it becomes a span's name
    status: int = 500
    operation: Operation | None = None
    principal: Principal | None = None
    call: Call | None = None
    outcome: Outcome | None = None  # None: rejected before it was sent to any upstream
    error_code: str | None = None
    cache: str = "off"  # hit, shared, miss, off
    route_choice: RouteChoice | None = None
    attempts: Sequence[Attempt] = ()
    deployment: str | None = None  # the one that answered
    usage: Usage | None = None
    cost: int | None = None  # in atoms (`gateway.core.money`); None without a receipt or without a known price
    currency: str = ""  # of `cost`; empty without a known price
    response_id: str | None = None
    finish_reasons: Sequence[str] = ()
    event_id: str | None = None  # of the receipt

    @property
    def route_reason(self) -> str | None:
        """The router's reason for its choice of deployment."""
        return None if self.route_choice is None else self.route_choice.reason

    @property
    def predicted_cached_tokens(self) -> int:
        """Cached tokens that the router predicted for the deployment that answered."""
        return predicted_cached_tokens(self.attempts, self.deployment)


def predicted_cached_tokens(attempts: Sequence[Attempt], deployment: str | None) -> int:
    """Cached tokens that the router predicted for the last attempt on this deployment; 0 without an attempt."""
    for attempt in reversed(attempts):
        if attempt.deployment == deployment:
            return attempt.predicted_cached_tokens
    return 0


class Times(msgspec.Struct, frozen=True):
    """Durations of a request for metrics, in nanoseconds. None if the request did not reach the phase."""

    whole: int
    own: int  # spent in the gateway: without the queue, the upstreams, and the replay of a cached answer
    queued: int | None
    chat: int | None


class Phase(NamedTuple):
    """One phase of a request. `within_chat` is true if the phase began while the upstream attempts were running."""

    name: str
    start_ns: int
    end_ns: int
    within_chat: bool = False

    @property
    def seconds(self) -> float:
        return (self.end_ns - self.start_ns) / 1e9


def phases(timings: PhaseTimings, attempts: Sequence[Attempt]) -> list[Phase]:
    """Return the phases of a request in order of their start.

    The phases that are not `within_chat` cover the request without gap or overlap. The first phase begins with the
    request, and each phase lasts until the next one. The phase `chat` covers all upstream attempts: it lasts from the
    first attempt, which `route` starts, to `settle`. Phases that begin during that time, for example the queue of a
    fallback model, are within `chat`. If `chat` begins before any attempt, it is the replay of an answer.
    """
    if (usual := _usual_phases(timings, attempts)) is not None:
        return usual
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


def _usual_phases(timings: PhaseTimings, attempts: Sequence[Attempt]) -> list[Phase] | None:
    """The phases of a request that entered each one once, with one attempt. None for any other."""
    entered = timings.phases
    if len(attempts) != 1 or len(entered) != len(_USUAL_ORDER):
        return None
    (a, _), (b, canonicalise), (c, lookup), (d, admit), (e, queue), (f, route), (g, chat), (h, settle) = entered
    started, opened, ended = timings.started_ns, attempts[0].started_ns, timings.ended_ns
    if (
        (a, b, c, d, e, f, g, h) != _USUAL_ORDER
        or not started <= canonicalise <= lookup <= admit <= queue <= route < opened < chat <= settle <= ended
    ):
        return None  # including a clock that was set back
    return [
        _phase((a, started, canonicalise, False)), _phase((b, canonicalise, lookup, False)),
        _phase((c, lookup, admit, False)), _phase((d, admit, queue, False)), _phase((e, queue, route, False)),
        _phase((f, route, opened, False)), _phase((g, opened, settle, False)), _phase((h, settle, ended, False)),
    ]  # fmt: skip


def times(timings: PhaseTimings, attempts: Sequence[Attempt]) -> Times:
    """Compute the sums over `phases`. Faster than `phases`, because most requests are not traced."""
    entered = timings.phases
    if len(attempts) == 1 and len(entered) == len(_USUAL_ORDER):
        (a, _), (b, _), (c, _), (d, _), (e, queue), (f, route), (g, relayed), (h, settled) = entered
        started, opened, ended = timings.started_ns, attempts[0].started_ns, timings.ended_ns
        # A clock that was set back breaks this order; the slow path handles that.
        if (a, b, c, d, e, f, g, h) == _USUAL_ORDER and (
            started <= queue <= route <= opened < relayed <= settled <= ended
        ):
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
    """Return start and end of the phase `chat`, which covers all upstream attempts."""
    settled, opened = entered[-1][2], None
    for name, start, _ in entered:  # the last entry of a phase counts
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
    """Return (phase, start, end) in order. Each phase ends when the next begins, even if the clock was set back."""
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
    """Make a phase before any attempt. `chat` is then a replay of a cached answer, or of another call's answer."""
    return Phase(names.REPLAY_SPAN if name == names.CHAT_PHASE else name, start_ns, end_ns)


_start = operator.itemgetter(1)
_phase = partial(tuple.__new__, Phase)  # takes a third of the time of `Phase`
_USUAL_ORDER = (
    "authenticate", "canonicalise", "cache.lookup", "admit", names.QUEUE_PHASE, names.ROUTE_PHASE, names.CHAT_PHASE,
    names.SETTLE_PHASE,
)  # fmt: skip
