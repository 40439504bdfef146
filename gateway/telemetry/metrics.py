"""Prometheus metrics: what every request adds up to; beside it, what other parts let us look at (`watched`).

Labels come from the policy, the doors and fixed lists, never from a client. Should a list be longer than thought, what
comes later is counted under "other" (`aggregates.CHILDREN_MAX`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

from gateway.policy import Policy
from gateway.telemetry import names
from gateway.telemetry.aggregates import Count, Histogram, Spread, Tally
from gateway.telemetry.observable import ObservableCollector, ObservableMetric, Reading
from gateway.telemetry.record import CallRecord, Times
from gateway.types import Attempt, Call, Operation, Outcome, Usage

DURATION_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320, 600)
WAIT_BUCKETS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 600, 3600)
OVERHEAD_BUCKETS = (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 1)
GEN_AI_DURATION_BUCKETS = tuple(0.01 * 2**i for i in range(14))  # as the conventions ask: 0.01 ... 81.92
UNSORTED_MAX = 512  # requests, after which their values are sorted into buckets
TOKEN_KINDS = ("input_uncached", "cache_read", "cache_write", "output", "reasoning")
GEN_AI_TOKEN_BUCKETS = tuple(4**i for i in range(14))  # likewise: 1 ... 67108864

disable_created_metrics()  # type: ignore[no-untyped-call]  # a second series per child, which Prometheus does not read in this format


class _OwnSeries(NamedTuple):
    """What every request adds to."""

    requests: Count
    duration: Spread
    ttft: Spread
    overhead: Spread
    queue_wait: Spread


class _UpstreamSeries(NamedTuple):
    """What a call adds to that an upstream was asked for."""

    duration: Spread
    failed_duration: Callable[[str], Spread]  # by the error's code
    tokens: tuple[Count, ...]  # one for each of TOKEN_KINDS
    input: Spread
    output: Spread
    prefix_predicted: Count
    prefix_reported: Count


class Metrics:
    """All metrics of one gateway, in a registry of their own."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        # What a request adds to, looked up once for all requests that have the same labels.
        self._own: dict[tuple[Operation | None, str, str, int, Outcome | None], _OwnSeries] = {}
        self._histograms: list[Histogram] = []
        self._unsorted = 0  # requests since their values were sorted into buckets
        self._upstream: dict[tuple[Operation, str, str, str], _UpstreamSeries] = {}
        ProcessCollector(registry=self._registry)
        self._requests = self._counter(
            "warmpath_requests",
            "Requests by how they ended. Outcome rejected: refused here, no upstream was asked.",
            "operation model class status outcome",
        )
        self._duration = self._histogram(
            "warmpath_request_duration_seconds",
            "From the request's arrival to the end of its reply.",
            "operation model class",
            DURATION_BUCKETS,
        )
        self._ttft = self._histogram(
            "warmpath_time_to_first_token_seconds",
            "From the request's arrival to the first chunk of its answer.",
            "operation model class",
            DURATION_BUCKETS,
        )
        self._queue_wait = self._histogram(
            "warmpath_queue_wait_seconds", "Time spent waiting for a turn.", "class", WAIT_BUCKETS
        )
        self._overhead = self._histogram(
            "warmpath_overhead_seconds",
            "The gateway's own time: all phases but the queue and the upstream. Reading the body is in it.",
            "operation",
            OVERHEAD_BUCKETS,
        )
        self._tokens = self._counter(
            "warmpath_tokens",
            "Tokens that upstreams worked on. reasoning is a part of output. For bills, use the ledger.",
            "model kind",
        )
        self._attempts = self._counter(
            "warmpath_upstream_attempts", "Tries at deployments by how they ended.", "deployment outcome"
        )
        self._lost_tokens = self._counter(
            "warmpath_hedge_lost_tokens",
            "Tokens of answers that lost a race, billed to nobody: by the servers' records or, where there was none in "
            "time, of the whole prompt (exact: false).",
            "deployment kind exact",
        )
        self._cache = self._counter("warmpath_cache", "Calls by what the exact response cache did for them.", "result")
        self._prefix_predicted = self._counter(
            "warmpath_prefix_predicted_tokens",
            "Cached tokens the router expected, for the calls whose engine reported.",
            "deployment",
        )
        self._prefix_reported = self._counter(
            "warmpath_prefix_reported_tokens", "Cached tokens the engines reported.", "deployment"
        )
        self._gen_ai_duration = self._histogram(
            "gen_ai_client_operation_duration_seconds",
            "From the first attempt to the end of the answer (OpenTelemetry GenAI conventions).",
            "gen_ai_operation_name gen_ai_provider_name gen_ai_request_model error_type",
            GEN_AI_DURATION_BUCKETS,
        )
        self._gen_ai_tokens = self._histogram(
            "gen_ai_client_token_usage",
            "Tokens of a call; input includes cached ones (OpenTelemetry GenAI conventions).",
            "gen_ai_operation_name gen_ai_provider_name gen_ai_request_model gen_ai_token_type",
            GEN_AI_TOKEN_BUCKETS,
        )
        self._reloads = self._counter("warmpath_policy_reloads", "Policies read, by result.", "result")
        self._policy = Gauge(
            "warmpath_policy_info", "The policy in force, by its hash.", ["hash"], registry=self._registry
        )
        self.failures = Counter(
            "warmpath_telemetry_failures", "Requests whose telemetry failed; the log says why.", registry=self._registry
        )

    def register(self, metric: ObservableMetric, read: Callable[[], Reading]) -> None:
        """Raises ValueError when the name is taken."""
        self._registry.register(ObservableCollector(metric, read))

    def render(self) -> tuple[bytes, str]:
        return generate_latest(self._registry), CONTENT_TYPE_PLAIN_0_0_4

    def policy_loaded(self, policy: Policy) -> None:
        self._policy.clear()
        self._policy.labels(policy.hash).set(1)
        self._reloads.of("ok").add()
        self._own.clear()  # with the names of the policy before
        self._upstream.clear()

    def policy_rejected(self) -> None:
        self._reloads.of("rejected").add()

    def update(self, record: CallRecord, times: Times) -> None:
        self._unsorted += 1
        if self._unsorted >= UNSORTED_MAX:
            self._unsorted = 0
            for histogram in self._histograms:
                histogram.sort_in()
        call, timings = record.call, record.timings
        model, class_name = (call.model.name, call.class_name) if call else (names.OTHER, names.OTHER)
        series = self._own_series(record.operation, model, class_name, record.status, record.outcome)
        series.requests.total += 1
        series.duration.observe(times.whole / 1e9)
        if timings.first_chunk_ns:
            series.ttft.observe((timings.first_chunk_ns - timings.started_ns) / 1e9)
        series.overhead.observe(times.own / 1e9)
        if times.queued is not None:
            series.queue_wait.observe(times.queued / 1e9)
        for attempt in record.attempts:
            self._attempts.of(attempt.deployment, _attempt_outcome(attempt)).total += 1
            if attempt.unbilled is not None:
                self._add_lost(attempt.deployment, attempt.unbilled)
        if call is not None:
            self._cache.of(record.cache).total += 1
            if record.attempts:
                self._update_upstream(record, call, times)

    def _add_lost(self, deployment: str, usage: Usage) -> None:
        exact = "true" if usage.exact else "false"
        self._lost_tokens.of(deployment, "input", exact).add(usage.input)
        self._lost_tokens.of(deployment, "output", exact).add(usage.output)

    def _update_upstream(self, record: CallRecord, call: Call, times: Times) -> None:
        """What only a call has that an upstream was asked for."""
        deployment = record.deployment or record.attempts[-1].deployment
        series = self._upstream_series(call, deployment)
        if times.chat is not None:
            duration = series.duration if not record.error_code else series.failed_duration(record.error_code)
            duration.observe(times.chat / 1e9)
        usage = record.usage
        if usage is None:
            return
        uncached, cache_read, cache_write, output, reasoning = series.tokens
        uncached.total += usage.input_uncached
        cache_read.total += usage.cache_read
        cache_write.total += usage.cache_write
        output.total += usage.output
        reasoning.total += usage.reasoning
        series.input.observe(usage.input)
        series.output.observe(usage.output)
        if usage.exact:
            series.prefix_predicted.total += record.predicted_cached_tokens
            series.prefix_reported.total += usage.cache_read

    def _own_series(
        self, operation: Operation | None, model: str, class_name: str, status: int, outcome: Outcome | None
    ) -> _OwnSeries:
        key = (operation, model, class_name, status, outcome)
        series = self._own.get(key)
        if series is None:
            of = (str(operation) if operation else names.OTHER, model, class_name)
            series = self._own[key] = _OwnSeries(
                requests=self._requests.of(*of, str(status), str(outcome) if outcome else "rejected"),
                duration=self._duration.of(*of),
                ttft=self._ttft.of(*of),
                overhead=self._overhead.of(of[0]),
                queue_wait=self._queue_wait.of(class_name),
            )
        return series

    def _upstream_series(self, call: Call, deployment: str) -> _UpstreamSeries:
        target = call.policy.deployments_by_name.get(deployment)
        provider = target.provider if target else names.OTHER
        key = (call.operation, provider, call.model.name, deployment)
        series = self._upstream.get(key)
        if series is None:
            model = call.model.name
            gen_ai = (names.GEN_AI_OPERATIONS[call.operation], provider, model)
            series = self._upstream[key] = _UpstreamSeries(
                duration=self._gen_ai_duration.of(*gen_ai, ""),
                failed_duration=partial(self._gen_ai_duration.of, *gen_ai),
                tokens=tuple([self._tokens.of(model, kind) for kind in TOKEN_KINDS]),
                input=self._gen_ai_tokens.of(*gen_ai, "input"),
                output=self._gen_ai_tokens.of(*gen_ai, "output"),
                prefix_predicted=self._prefix_predicted.of(deployment),
                prefix_reported=self._prefix_reported.of(deployment),
            )
        return series

    def _counter(self, name: str, text: str, labels: str) -> Tally:
        tally = Tally(name, text, labels)
        self._registry.register(tally)
        return tally

    def _histogram(self, name: str, text: str, labels: str, buckets: Sequence[float]) -> Histogram:
        histogram = Histogram(name, text, labels, buckets)
        self._histograms.append(histogram)
        self._registry.register(histogram)
        return histogram


def _attempt_outcome(attempt: Attempt) -> str:
    """As the receipt says it, but other statuses than these by their class: an upstream may send any number."""
    if attempt.outcome == "ok":
        return attempt.outcome
    kind, _, status = attempt.outcome.partition("_")
    if kind != "status" or status in ("", "429", "500", "502", "503", "504"):
        return attempt.outcome
    return f"status_{status[:1]}xx"
