"""The last calls that are over, for the admin API: what became of each, and never what was asked or answered.

A call leaves what is cheap to keep behind, by reference, and no `Call`, whose fields are the prompt. It is put into
words when somebody asks, once. Calls are kept by class, and those that went wrong apart from the others: neither a
batch nor a busy hour pushes out what somebody will look for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from heapq import merge
from itertools import islice
from typing import Annotated, Any

import msgspec

from gateway.core.times import rfc3339
from gateway.telemetry.record import CallRecord, phases, predicted_cached_tokens, times
from gateway.types import Attempt, Operation, Outcome, PhaseTimings, Usage

RECENT_CALLS = 500  # of each kind, kept by each worker; a call leaves some two thousand bytes
KINDS_MAX = 16  # classes come from the policy, which may change: what is of yet another one is kept with the refused

_encode = msgspec.json.encode


class RecentCall(msgspec.Struct, frozen=True, array_like=True):
    """One call as a worker tells it: `told` is a JSON object."""

    ended_ns: int  # since the epoch
    started_ns: int
    told: msgspec.Raw


class RecentCallsQuery(msgspec.Struct, frozen=True, array_like=True):
    """Which calls: `limit` of them at most, of one class or of any, and only those that went wrong or all."""

    limit: Annotated[int, msgspec.Meta(ge=0)]
    class_name: str | None = None
    troubled: bool = False


_told_calls = msgspec.json.Decoder(list[RecentCall])
_wanted = msgspec.json.Decoder(RecentCallsQuery)


class _Kept(msgspec.Struct):
    """What is left of a `CallRecord`."""

    call_id: str
    trace_id: int
    timings: PhaseTimings
    path: str
    operation: Operation | None
    status: int
    outcome: Outcome | None
    error_code: str | None
    tenant: str | None
    key_id: str | None
    model: str | None
    class_name: str | None
    cache: str
    deployment: str | None
    route_reason: str | None
    event_id: str | None
    finish_reasons: Sequence[str]
    usage: Usage | None
    attempts: Sequence[Attempt]
    told: bytes = b""  # once it has been asked for


class RecentCalls:
    """The last `keeps` calls of each kind, of this process."""

    def __init__(self, worker: int = 0, *, keeps: int = RECENT_CALLS) -> None:
        self._worker = worker
        self._keeps = keeps
        self._kinds: dict[tuple[str | None, bool], deque[_Kept]] = {}  # by class, and whether they went wrong

    def add(self, record: CallRecord) -> None:
        principal, call, attempts = record.principal, record.call, record.attempts
        class_name = None if call is None else call.class_name
        troubled = record.outcome is not Outcome.COMPLETE or len(attempts) > 1
        kind = self._kinds.get((class_name, troubled))
        if kind is None:
            kind = self._new_kind(class_name, troubled)
        kind.append(
            _Kept(
                record.call_id, record.trace.trace_id, record.timings, record.path, record.operation, record.status,
                record.outcome, record.error_code,
                None if principal is None else principal.tenant.name,
                None if principal is None else principal.key_id,
                None if call is None else call.model.name,
                class_name,
                record.cache, record.deployment, record.route_reason, record.event_id, record.finish_reasons,
                record.usage, attempts,
            )
        )  # fmt: skip

    def _new_kind(self, class_name: str | None, troubled: bool) -> deque[_Kept]:
        name = (class_name if len(self._kinds) < KINDS_MAX else None, troubled)
        return self._kinds.setdefault(name, deque(maxlen=self._keeps))

    def answer(self, wanted: bytes) -> bytes:
        """`newest`, for the JSON of a `RecentCallsQuery`; nothing, for what is none."""
        try:
            return self.newest(_wanted.decode(wanted))
        except msgspec.MsgspecError:
            return b""

    def newest(self, wanted: RecentCallsQuery) -> bytes:
        """JSON, for `decode_recent_calls`: the call that ended last at first."""
        kinds = [reversed(kept) for (_, troubled), kept in self._kinds.items() if troubled or not wanted.troubled]
        found: Iterator[_Kept] = iter(merge(*kinds, key=_ended_ns, reverse=True))
        if wanted.class_name is not None:
            found = (kept for kept in found if kept.class_name == wanted.class_name)
        return b"[%b]" % b",".join([kept.told or self._tell(kept) for kept in islice(found, wanted.limit)])

    def _tell(self, kept: _Kept) -> bytes:
        kept.told = _encode((_ended_ns(kept), kept.timings.started_ns, {**_words(kept), "worker": self._worker}))
        return kept.told


def _ended_ns(kept: _Kept) -> int:
    return max(kept.timings.ended_ns, kept.timings.started_ns)


def decode_recent_calls(content: bytes) -> list[RecentCall]:
    """What `RecentCalls.newest` has told. Raises `msgspec.MsgspecError` where it is something else."""
    return _told_calls.decode(content)


def _words(kept: _Kept) -> dict[str, Any]:
    timings, attempts, usage = kept.timings, kept.attempts, kept.usage
    started, lasted = timings.started_ns, times(timings, attempts)
    return {
        "call_id": kept.call_id,
        "trace_id": f"{kept.trace_id:032x}",
        "time": f"{rfc3339(started)[:23]}Z",  # to the millisecond
        "path": kept.path,
        "operation": kept.operation,
        "status": kept.status,
        "outcome": kept.outcome,
        "error_code": kept.error_code,
        "tenant": kept.tenant,
        "key_id": kept.key_id,
        "model": kept.model,
        "class": kept.class_name,
        "cache": kept.cache,
        "deployment": kept.deployment,
        "route_reason": kept.route_reason,
        "event_id": kept.event_id,
        "finish_reasons": list(kept.finish_reasons),
        "duration_ms": _ms(lasted.whole),
        "own_ms": _ms(lasted.own),
        "queued_ms": None if lasted.queued is None else _ms(lasted.queued),
        "ttft_ms": _ms(timings.first_chunk_ns - started) if timings.first_chunk_ns else None,
        "usage": None if usage is None else _usage(usage),
        "predicted_cached_tokens": predicted_cached_tokens(attempts, kept.deployment),
        "phases": [
            {
                "name": phase.name,
                "start_ms": _ms(phase.start_ns - started),
                "end_ms": _ms(phase.end_ns - started),
                "within_chat": phase.within_chat,
            }
            for phase in phases(timings, attempts)
        ],
        "attempts": [_attempt(attempt, started) for attempt in attempts],
    }


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_uncached": usage.input_uncached,
        "cache_read": usage.cache_read,
        "cache_write": usage.cache_write,
        "output": usage.output,
        "reasoning": usage.reasoning,
        "exact": usage.exact,
    }


def _attempt(attempt: Attempt, started_ns: int) -> dict[str, Any]:
    return {
        "deployment": attempt.deployment,
        "outcome": attempt.outcome,
        "status": attempt.status,
        "start_ms": _ms(attempt.started_ns - started_ns),
        "end_ms": _ms(attempt.ended_ns - started_ns),
        "span_id": f"{attempt.span_id:016x}",
        "predicted_cached_tokens": attempt.predicted_cached_tokens,
        "continues": attempt.continues,
    }


def _ms(nanoseconds: int) -> float:
    return round(nanoseconds / 1e6, 3)


__all__ = ["RECENT_CALLS", "RecentCall", "RecentCalls", "RecentCallsQuery", "decode_recent_calls"]
