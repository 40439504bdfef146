"""One finished request as telemetry sees it, and how its marks become phases."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from gateway.telemetry import names
from gateway.types import Attempt, Call, Marks, Operation, Outcome, Principal, Trace, Usage


class CallRecord(msgspec.Struct, kw_only=True):
    """Filled while the request runs, handed to `Telemetry.record` once after its reply.

    What a request never came to stays at its default: one without a valid key has neither principal nor call.
    Nothing here holds a key or a message, and `call.fields` is read for numbers only.
    """

    trace: Trace
    server_span_id: int
    marks: Marks
    method: str
    path: str  # of the door, never what a client made up: it becomes a span's name
    status: int = 500
    operation: Operation | None = None
    principal: Principal | None = None
    call: Call | None = None
    outcome: Outcome | None = None  # None: refused here, before any upstream was asked
    error_code: str | None = None
    cache: str = "off"  # hit, shared, miss, off
    route_reason: str | None = None  # why that deployment, in the words of the router
    attempts: Sequence[Attempt] = ()
    deployment: str | None = None  # the one that answered
    usage: Usage | None = None
    response_id: str | None = None
    finish_reasons: Sequence[str] = ()
    event_id: str | None = None  # of the receipt

    @property
    def predicted_cached_tokens(self) -> int:
        """What the router expected of the deployment that answered."""
        for attempt in reversed(self.attempts):
            if attempt.deployment == self.deployment:
                return attempt.predicted_cached_tokens
        return 0


class Phase(NamedTuple):
    name: str
    start_ns: int
    end_ns: int
    within_chat: bool = False

    @property
    def seconds(self) -> float:
        return (self.end_ns - self.start_ns) / 1e9


def phases(marks: Marks, attempts: Sequence[Attempt]) -> list[Phase]:
    """The request's time, cut at the marks; those not `within_chat` cover it without gap or overlap.

    The first phase begins with the request and each lasts until the next. `chat` is the whole dialogue with the
    upstreams: from the first attempt, which `route` starts, up to `settle`; whatever is entered meanwhile (the
    queue of a fallback model, say) lies within it. A `chat` mark before any attempt is the replay of an answer.
    """
    starts: list[int] = []
    latest = marks.started_ns
    for _, ns in marks.phases:
        latest = max(latest, ns) if starts else marks.started_ns  # the clock may be set back
        starts.append(latest)
    if not starts:
        return []
    ends = [*starts[1:], max(marks.ended_ns, latest)]
    entered = [(name, start, end) for (name, _), start, end in zip(marks.phases, starts, ends, strict=True)]
    if not attempts:
        return [_replay(*phase) for phase in entered]

    settled = next((start for name, start, _ in reversed(entered) if name == names.SETTLE_PHASE), ends[-1])
    relayed = next((start for name, start, _ in reversed(entered) if name == names.CHAT_PHASE), settled)
    opened = max(marks.started_ns, min(relayed, *(attempt.started_ns for attempt in attempts)))
    result = [Phase(names.CHAT_PHASE, opened, settled)]
    for name, start, end in entered:
        if start < opened or (start == opened and name != names.CHAT_PHASE):
            result.append(_replay(name, start, min(end, opened)))
        elif name != names.CHAT_PHASE:
            result.append(Phase(name, start, end, within_chat=start < settled))
    return sorted(result, key=lambda phase: phase.start_ns)


def _replay(name: str, start_ns: int, end_ns: int) -> Phase:
    """The `chat` mark before any attempt: an answer from the cache, or from another call's upstream."""
    return Phase(names.REPLAY_SPAN if name == names.CHAT_PHASE else name, start_ns, end_ns)
