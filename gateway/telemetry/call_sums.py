"""Sums over finished calls by latency class, model and deployment, for the dashboard's history, and the last uses of
keys.

`RecentCalls` hands over finished calls. They are added up in groups of `FOLD_AT`, so that a request costs one append to
a list. `take` returns the sums since the last `take`. All label values come from the policy, and their number is
bounded (`LABELS_MAX`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol, TypeVar

import msgspec

from gateway.core.money import atoms_to_nanos
from gateway.telemetry import names
from gateway.types import Attempt, Outcome, PhaseTimings, Usage

FOLD_AT = 128  # calls; adding them up takes about half a millisecond
LABELS_MAX = 64  # classes, models and deployments with sums of their own; further ones are summed under "other"
ERRORS_MAX = 32  # error codes of one sum
KEYS_MAX = 20_000  # keys whose last use is known until it is taken
BUCKETS_PER_OCTAVE = 8  # of a histogram of times: a bucket is 9 % wide

ANSWERED, REJECTED, LIMITED, FAILED, DISCONNECTED = "answered", "rejected", "limited", "failed", "disconnected"
Label = TypeVar("Label", str, int)
_FAILED_OUTCOMES = frozenset((Outcome.UPSTREAM_CUT, Outcome.TIMEOUT, Outcome.GATEWAY_LOST))


def result_of(status: int, outcome: Outcome | None) -> str:
    """The result of a call for operators.

    `rejected`: the client's error. `limited`: a limit or a budget was used up. `disconnected`: by the client.
    """
    if outcome is Outcome.CLIENT_GONE or status == 499:
        return DISCONNECTED
    if status >= 500 or outcome in _FAILED_OUTCOMES:
        return FAILED
    if status == 429 or outcome is Outcome.BUDGET_SPENT:
        return LIMITED
    return REJECTED if status >= 400 else ANSWERED


class FinishedCall(Protocol):
    """What is read of a finished call. Implemented by the calls that `RecentCalls` keeps."""

    timings: PhaseTimings
    status: int
    outcome: Outcome | None
    error_code: str | None
    key_id: str | None
    model: str | None
    class_name: str | None
    deployment: str | None
    usage: Usage | None
    attempts: Sequence[Attempt]
    cost: int | None
    currency: str


class Sums(msgspec.Struct, omit_defaults=True):
    """Sums over some calls. Times are histograms: `ttft` has the number of calls by bucket (`bucket_of`)."""

    results: dict[str, int] = {}
    errors: dict[str, int] = {}  # by error code; at a deployment, its failed attempts by outcome
    ttft: dict[int, int] = {}
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    cost: dict[str, int] = {}  # in nanos, by currency

    def add(self, other: Sums) -> None:
        """Add the sums of other calls."""
        _add_all(self.results, other.results)
        _add_all(self.errors, other.errors)
        _add_all(self.ttft, other.ttft)
        _add_all(self.cost, other.cost)
        self.prompt_tokens += other.prompt_tokens
        self.cached_tokens += other.cached_tokens
        self.output_tokens += other.output_tokens

    @property
    def requests(self) -> int:
        return sum(self.results.values())

    def count(self, result: str, ttft_bucket: int | None, call: FinishedCall) -> None:
        """Add one call, but not its errors."""
        self.results[result] = self.results.get(result, 0) + 1
        if ttft_bucket is not None:
            self.ttft[ttft_bucket] = self.ttft.get(ttft_bucket, 0) + 1
        usage = call.usage
        if usage is not None and call.attempts:
            self.prompt_tokens += usage.input
            self.cached_tokens += usage.cache_read
            self.output_tokens += usage.output
        if call.cost:
            self.cost[call.currency] = self.cost.get(call.currency, 0) + atoms_to_nanos(call.cost)

    def count_error(self, code: str) -> None:
        """Count an error, under "other" if there are many."""
        if code not in self.errors and len(self.errors) >= ERRORS_MAX:
            code = names.OTHER
        self.errors[code] = self.errors.get(code, 0) + 1


class GroupedSums(msgspec.Struct, omit_defaults=True):
    """Sums over all calls of a time, and by latency class, model and deployment.

    Calls without a class or model, such as those with an invalid key, are counted under "other".
    """

    total: Sums = msgspec.field(default_factory=Sums)
    classes: dict[str, Sums] = {}
    models: dict[str, Sums] = {}
    deployments: dict[str, Sums] = {}

    def add(self, other: GroupedSums) -> None:
        """Add the sums of another time, or of another process."""
        self.total.add(other.total)
        for mine, theirs in (
            (self.classes, other.classes), (self.models, other.models), (self.deployments, other.deployments)
        ):  # fmt: skip
            for name, sums in theirs.items():
                sums_at(mine, name).add(sums)


class CallSums:
    """Adds up finished calls. Used on the event loop only."""

    def __init__(self) -> None:
        self._pending: list[FinishedCall] = []
        self._sums = GroupedSums()
        self._last_uses: dict[str, int] = {}

    def add(self, call: FinishedCall) -> None:
        """Add a finished call."""
        self._pending.append(call)
        if len(self._pending) >= FOLD_AT:
            self._fold()

    def take(self) -> GroupedSums:
        """The sums since the last `take`."""
        self._fold()
        taken, self._sums = self._sums, GroupedSums()
        return taken

    def take_last_uses(self) -> dict[str, int]:
        """When each key was last used, in nanoseconds since the epoch, of the keys used since the last call."""
        self._fold()
        taken, self._last_uses = self._last_uses, {}
        return taken

    def _fold(self) -> None:
        for call in self._pending:
            self._count(call)
        self._pending.clear()

    def _count(self, call: FinishedCall) -> None:
        timings, attempts, sums = call.timings, call.attempts, self._sums
        result, first_chunk = result_of(call.status, call.outcome), timings.first_chunk_ns
        ttft = bucket_of(first_chunk - timings.started_ns) if first_chunk else None
        groups = (
            sums.total,
            sums_at(sums.classes, call.class_name or names.OTHER),
            sums_at(sums.models, call.model or names.OTHER),
        )
        for each in groups:
            each.count(result, ttft, call)
        if result != ANSWERED:
            for each in groups:
                each.count_error(call.error_code or str(call.outcome or call.status))
        if attempts:
            if call.deployment is not None:
                after_ns = first_chunk - attempts[-1].started_ns
                sums_at(sums.deployments, call.deployment).count(
                    result, bucket_of(after_ns) if first_chunk else None, call
                )
            for attempt in attempts:
                if is_deployment_fault(attempt.outcome):
                    sums_at(sums.deployments, attempt.deployment).count_error(attempt.outcome)
        if call.key_id is not None and (call.key_id in self._last_uses or len(self._last_uses) < KEYS_MAX):
            self._last_uses[call.key_id] = timings.started_ns


def is_deployment_fault(outcome: str) -> bool:
    """True if an attempt failed because of its deployment. A rejected request or a disconnected client does not
    count."""
    return outcome in ("connect_error", "timeout", "cut", "malformed", "upstream_cut") or outcome.startswith(
        ("status_429", "status_5")
    )


def bucket_of(nanoseconds: int) -> int:
    """The bucket of a time. Bucket b has times below 2 ** ((b + 1) / BUCKETS_PER_OCTAVE) milliseconds."""
    return math.floor(math.log2(max(nanoseconds, 1) / 1e6) * BUCKETS_PER_OCTAVE)


def quantile_ms(q: float, buckets: dict[int, int]) -> float | None:
    """A quantile of a histogram in milliseconds, interpolated within its bucket. None if the histogram is empty."""
    rank = q * sum(buckets.values())
    below = 0
    for bucket in sorted(buckets):
        if below + buckets[bucket] >= rank:
            return float(2.0 ** ((bucket + (rank - below) / buckets[bucket]) / BUCKETS_PER_OCTAVE))
        below += buckets[bucket]
    return None


def sums_at(groups: dict[str, Sums], name: str) -> Sums:
    """The sums of one label value; those of "other" if there are too many."""
    found = groups.get(name)
    if found is None:
        if len(groups) >= LABELS_MAX:
            name = names.OTHER
        found = groups.setdefault(name, Sums())
    return found


def _add_all(mine: dict[Label, int], theirs: dict[Label, int]) -> None:
    for name, count in theirs.items():
        mine[name] = mine.get(name, 0) + count


__all__ = [
    "CallSums",
    "GroupedSums",
    "Sums",
    "bucket_of",
    "is_deployment_fault",
    "quantile_ms",
    "result_of",
    "sums_at",
]
