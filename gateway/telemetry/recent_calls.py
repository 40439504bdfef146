"""The last finished calls, for the admin API: outcome, times and usage of each, without prompts and answers.

`RecentCalls.add` stores references to the parts of a `CallRecord` that are cheap to keep; never the `Call`, whose
fields are the prompt. A call is encoded as JSON on the first query and the JSON is kept. There is one bounded queue per
latency class, and a separate one per class for failed and retried calls, so that neither a batch nor a busy hour
displaces the calls that an operator looks for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from heapq import merge
from itertools import islice
from typing import Annotated, Any

import msgspec

from gateway.core.kv_transfer import PREFILLED
from gateway.core.money import atoms_to_text
from gateway.core.times import rfc3339
from gateway.telemetry.call_sums import CallSums, is_deployment_fault, result_of
from gateway.telemetry.record import CallRecord, phases, predicted_cached_tokens, times
from gateway.types import Attempt, Operation, Outcome, PhaseTimings, Usage

RECENT_CALLS = 500  # per queue and worker; a call takes about 2,000 bytes
QUEUES_MAX = (
    16  # a changing policy brings new classes; calls of further ones share a queue with requests without a class
)

_encode = msgspec.json.encode


class RecentCall(msgspec.Struct, frozen=True, array_like=True):
    """One call as a worker reports it to the worker that answers the query. `json` is the JSON object of the call."""

    ended_ns: int  # since the epoch
    started_ns: int
    json: msgspec.Raw


class RecentCallsQuery(msgspec.Struct, frozen=True, array_like=True):
    """A query for recent calls: at most `limit`, of one latency class or all, and all or only the `troubled` ones.

    A call is troubled if it did not complete or needed more than one attempt.
    """

    limit: Annotated[int, msgspec.Meta(ge=0)]
    class_name: str | None = None
    troubled: bool = False


_calls_decoder = msgspec.json.Decoder(list[RecentCall])
_query_decoder = msgspec.json.Decoder(RecentCallsQuery)


class _CallSummary(msgspec.Struct):
    """The parts of a `CallRecord` that are kept."""

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
    cost: int | None
    currency: str
    json: bytes = b""  # set by the first query


class RecentCalls:
    """The last finished calls of this process, at most `capacity` in each queue. Used on the event loop only.

    `sums` has the sums over all finished calls.
    """

    def __init__(self, worker: int = 0, *, capacity: int = RECENT_CALLS) -> None:
        self.sums = CallSums()
        self._worker = worker
        self._capacity = capacity
        self._queues: dict[tuple[str | None, bool], deque[_CallSummary]] = {}  # by class and troubled

    def add(self, record: CallRecord) -> None:
        """Store a finished request."""
        principal, call, attempts = record.principal, record.call, record.attempts
        class_name = None if call is None else call.class_name
        troubled = record.outcome is not Outcome.COMPLETE or len(attempts) > 1 + _has_prefill(attempts)
        queue = self._queues.get((class_name, troubled))
        if queue is None:
            queue = self._new_queue(class_name, troubled)
        summary = _CallSummary(
                record.call_id, record.trace.trace_id, record.timings, record.path, record.operation, record.status,
                record.outcome, record.error_code,
                None if principal is None else principal.tenant_name,
                None if principal is None else principal.key_id,
                None if call is None else call.model_name,
                class_name,
                record.cache, record.deployment, record.route_reason, record.event_id, record.finish_reasons,
                record.usage, attempts, record.cost, record.currency,
            )  # fmt: skip
        queue.append(summary)
        self.sums.add(summary)

    def _new_queue(self, class_name: str | None, troubled: bool) -> deque[_CallSummary]:
        name = (class_name if len(self._queues) < QUEUES_MAX else None, troubled)
        return self._queues.setdefault(name, deque(maxlen=self._capacity))

    def answer(self, query: bytes) -> bytes:
        """`newest` for an encoded `RecentCallsQuery`; empty for an invalid one."""
        try:
            return self.newest(_query_decoder.decode(query))
        except msgspec.MsgspecError:
            return b""

    def newest(self, query: RecentCallsQuery) -> bytes:
        """The matching calls, latest end first, as JSON for `decode_recent_calls`."""
        queues = [reversed(queue) for (_, troubled), queue in self._queues.items() if troubled or not query.troubled]
        found: Iterator[_CallSummary] = iter(merge(*queues, key=_ended_ns, reverse=True))
        if query.class_name is not None:
            found = (call for call in found if call.class_name == query.class_name)
        return b"[%b]" % b",".join([call.json or self._encode(call) for call in islice(found, query.limit)])

    def _encode(self, call: _CallSummary) -> bytes:
        call.json = _encode((_ended_ns(call), call.timings.started_ns, {**_fields(call), "worker": self._worker}))
        return call.json


def _ended_ns(call: _CallSummary) -> int:
    return max(call.timings.ended_ns, call.timings.started_ns)


def decode_recent_calls(content: bytes) -> list[RecentCall]:
    """Decode the result of `RecentCalls.newest`. Raises `msgspec.MsgspecError` for anything else."""
    return _calls_decoder.decode(content)


def _fields(call: _CallSummary) -> dict[str, Any]:
    timings, attempts, usage = call.timings, call.attempts, call.usage
    started, durations = timings.started_ns, times(timings, attempts)
    return {
        "call_id": call.call_id,
        "trace_id": f"{call.trace_id:032x}",
        "time": f"{rfc3339(started)[:23]}Z",  # to the millisecond
        "path": call.path,
        "operation": call.operation,
        "status": call.status,
        "outcome": call.outcome,
        "result": result_of(call.status, call.outcome),
        "error_code": call.error_code,
        "tenant": call.tenant,
        "key_id": call.key_id,
        "model": call.model,
        "class": call.class_name,
        "cache": call.cache,
        "deployment": call.deployment,
        "route_reason": call.route_reason,
        "event_id": call.event_id,
        "finish_reasons": list(call.finish_reasons),
        "duration_ms": _ms(durations.whole),
        "own_ms": _ms(durations.own),
        "queued_ms": None if durations.queued is None else _ms(durations.queued),
        "ttft_ms": _ms(timings.first_chunk_ns - started) if timings.first_chunk_ns else None,
        "usage": None if usage is None else _usage(usage),
        "cost": None if call.cost is None else atoms_to_text(call.cost),
        "currency": call.currency or None,
        "predicted_cached_tokens": predicted_cached_tokens(attempts, call.deployment),
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


def _has_prefill(attempts: Sequence[Attempt]) -> bool:
    """Whether a prefill deployment has computed the prompt, which is no failed attempt."""
    return bool(attempts) and attempts[0].outcome == PREFILLED


def _attempt(attempt: Attempt, started_ns: int) -> dict[str, Any]:
    return {
        "deployment": attempt.deployment,
        "outcome": attempt.outcome,
        "failed": is_deployment_fault(attempt.outcome),
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
