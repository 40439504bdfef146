"""Prometheus metrics that each request updates, and the registry of all metrics.

`Metrics.update` runs once per request, after its reply. The series that a request updates are looked up once for all
requests with the same labels and kept (`_RequestSeries`, `_UpstreamSeries`). Histograms collect values in lists, which
are sorted into buckets every `UNSORTED_MAX` requests and at each scrape. `request_metrics.py` declares these metrics,
and `observable.py` those of other components.

Label values come from the policy, the endpoints and fixed lists, never from a client. If a metric still has too many
combinations, further ones are counted under "other" (`aggregates.SERIES_MAX`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import msgspec
from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.openmetrics import exposition as openmetrics

from gateway.core.kv_transfer import PREFILLED
from gateway.core.money import ATOM_DECIMALS
from gateway.policy import Policy
from gateway.telemetry import names, request_metrics
from gateway.telemetry.aggregates import CounterSeries, HistogramSeries, LabelledCounter, LabelledHistogram
from gateway.telemetry.observable import ObservableCollector, ObservableMetric, Reading
from gateway.telemetry.record import CallRecord, Times, predicted_cached_tokens
from gateway.telemetry.request_metrics import CounterDeclaration, HistogramDeclaration
from gateway.telemetry.tenants import TenantMetrics
from gateway.types import Attempt, Call, Operation, Outcome, Usage

UNSORTED_MAX = 512  # requests after which observed values are sorted into buckets
TOKEN_KINDS = ("input_uncached", "cache_read", "cache_write", "output", "reasoning")
NAMED_TENANTS = 20  # tenants with their own label, by default
OPENMETRICS_TYPE = "application/openmetrics-text"
CURRENCY_UNITS_PER_ATOM = 10.0**-ATOM_DECIMALS
_HEDGE_LOST = "hedge_lost"  # the outcome of a cancelled hedge attempt (`gateway.routing.attempt_log`)

# Without this, each series has a second one with its creation time. Prometheus ignores that one in the text format.
disable_created_metrics()


class _RequestSeries(msgspec.Struct, frozen=True):
    """The series that every request updates."""

    requests: CounterSeries
    duration: HistogramSeries
    ttft: HistogramSeries
    overhead: HistogramSeries
    queue_wait: HistogramSeries


class _UpstreamSeries(msgspec.Struct, frozen=True):
    """The series that a call updates if it was sent to an upstream."""

    duration: HistogramSeries
    failed_duration: Callable[[str], HistogramSeries]  # by error code
    tokens: tuple[CounterSeries, ...]  # one for each of TOKEN_KINDS
    input: HistogramSeries
    output: HistogramSeries
    prefix_predicted: CounterSeries
    prefix_reported: CounterSeries


class Metrics:
    """All metrics of one gateway, in a registry of their own. `named_tenants` have their own label."""

    def __init__(self, *, named_tenants: int = NAMED_TENANTS) -> None:
        self._registry = CollectorRegistry()
        self._tenants = TenantMetrics(named_tenants)
        # The series that a request updates, by its labels.
        self._request_series_cache: dict[tuple[Operation | None, str, str, int, Outcome | None], _RequestSeries] = {}
        self._histograms: list[LabelledHistogram] = []
        self._unsorted = 0  # requests since values were last sorted into buckets
        self._upstream_series_cache: dict[tuple[Operation, str, str], _UpstreamSeries] = {}
        self._loaded: Policy | None = None  # to whose calls the cached series belong
        ProcessCollector(registry=self._registry)
        self._requests = self._counter(request_metrics.REQUESTS)
        self._duration = self._histogram(request_metrics.DURATION)
        self._ttft = self._histogram(request_metrics.TTFT)
        self._queue_wait = self._histogram(request_metrics.QUEUE_WAIT)
        self._overhead = self._histogram(request_metrics.OVERHEAD)
        self._tokens = self._counter(request_metrics.TOKENS)
        self._cost = self._counter(request_metrics.COST)
        self._unpriced = self._counter(request_metrics.UNPRICED)
        self._registry.register(self._tenants)
        self._attempts = self._counter(request_metrics.ATTEMPTS)
        self._block_loads = self._counter(request_metrics.BLOCK_LOADS)
        self._prefill_tokens = self._counter(request_metrics.PREFILL_TOKENS)
        self._prefill_seconds = self._histogram(request_metrics.PREFILL_SECONDS)
        self._lost_tokens = self._counter(request_metrics.LOST_TOKENS)
        self._cache = self._counter(request_metrics.CACHE)
        self._prefix_predicted = self._counter(request_metrics.PREFIX_PREDICTED)
        self._prefix_reported = self._counter(request_metrics.PREFIX_REPORTED)
        self._gen_ai_duration = self._histogram(request_metrics.GEN_AI_DURATION)
        self._gen_ai_tokens = self._histogram(request_metrics.GEN_AI_TOKENS)
        self._reloads = self._counter(request_metrics.RELOADS)
        self._policy = Gauge("warmpath_policy_info", "Hash of the policy in force.", ["hash"], registry=self._registry)
        self.failures = Counter(
            "warmpath_telemetry_failures",
            "Requests whose telemetry failed. The log has the reason.",
            registry=self._registry,
        )

    def register(self, metric: ObservableMetric, read: Callable[[], Reading]) -> None:
        """Add an observable metric. Raises `ValueError` if its name is registered already."""
        self._registry.register(ObservableCollector(metric, read))

    def render(self, accept: str = "") -> tuple[bytes, str]:
        """All metrics as text, and the content type: OpenMetrics with exemplars if `accept` names it."""
        if OPENMETRICS_TYPE in accept:
            return openmetrics.generate_latest(self._registry), openmetrics.CONTENT_TYPE_LATEST
        return generate_latest(self._registry), CONTENT_TYPE_PLAIN_0_0_4

    def collect(self) -> Iterator[Metric]:
        """All metrics as Prometheus' families, read now."""
        return iter(self._registry.collect())

    def policy_loaded(self, policy: Policy) -> None:
        """Count a reload, and show the new policy's hash."""
        self._policy.clear()
        self._policy.labels(policy.hash).set(1)
        self._reloads.labels("ok").add()
        self._loaded = policy
        self._request_series_cache.clear()  # the cached series have labels from the previous policy
        self._upstream_series_cache.clear()

    def policy_rejected(self) -> None:
        """Count a reload that was rejected."""
        self._reloads.labels("rejected").add()

    def update(self, record: CallRecord, times: Times) -> None:
        """Add a finished request to all metrics."""
        self._unsorted += 1
        if self._unsorted >= UNSORTED_MAX:
            self._unsorted = 0
            for histogram in self._histograms:
                histogram.fill_buckets()
        call, timings = record.call, record.timings
        model, class_name = (call.model_name, call.class_name) if call else (names.OTHER, names.OTHER)
        series = self._request_series(record.operation, model, class_name, record.status, record.outcome)
        series.requests.total += 1  # not `add`: a function call per update would show in the cost of a request
        series.duration.observe(times.whole / 1e9)
        if timings.first_chunk_ns:
            series.ttft.observe((timings.first_chunk_ns - timings.started_ns) / 1e9)
        series.overhead.observe(times.own / 1e9)
        if times.queued is not None:
            series.queue_wait.observe(times.queued / 1e9)
        for attempt in record.attempts:
            self._attempts.labels(attempt.deployment, _attempt_outcome(attempt)).total += 1
            if attempt.blocks_from is not None:
                self._block_loads.labels(attempt.deployment, attempt.blocks_from).total += 1
            if attempt.unbilled is not None:
                self._add_unbilled(attempt, attempt.unbilled)
        if call is not None:
            self._cache.labels(record.cache).total += 1
            self._update_tenant(record, call)
            if record.attempts:
                self._update_upstream(record, call, times)

    def add_exemplars(self, record: CallRecord, times: Times) -> None:
        """Link the request's duration and its time to first token to its trace. Call it after `update`."""
        call, timings, trace_id = record.call, record.timings, record.trace.trace_id
        if call is None:
            return
        series = self._request_series(record.operation, call.model_name, call.class_name, record.status, record.outcome)
        series.duration.exemplify(times.whole / 1e9, trace_id, timings.ended_ns)
        if timings.first_chunk_ns:
            series.ttft.exemplify((timings.first_chunk_ns - timings.started_ns) / 1e9, trace_id, timings.ended_ns)

    def _update_tenant(self, record: CallRecord, call: Call) -> None:
        """Update the metrics by tenant, and the cost."""
        sums = self._tenants.sums(call.principal.tenant_name, call.class_name, record.currency)
        sums.requests += 1
        usage = record.usage
        if usage is not None and record.attempts:
            sums.input_uncached += usage.input_uncached
            sums.cache_read += usage.cache_read
            sums.cache_write += usage.cache_write
            sums.output += usage.output
        if record.cost:
            sums.cost += record.cost
            cost = self._cost.labels(call.model_name, call.class_name, record.deployment or "", record.currency)
            cost.total += record.cost * CURRENCY_UNITS_PER_ATOM
        elif record.cost is None and usage is not None:
            self._unpriced.labels(call.model_name).total += 1

    def _add_unbilled(self, attempt: Attempt, usage: Usage) -> None:
        deployment = attempt.deployment
        if attempt.outcome == PREFILLED:
            self._prefill_tokens.labels(deployment, "computed").add(usage.input_uncached)
            self._prefill_tokens.labels(deployment, "cached").add(usage.cache_read)
            self._prefill_seconds.labels(deployment).observe((attempt.ended_ns - attempt.started_ns) / 1e9)
        if attempt.outcome != _HEDGE_LOST:
            return
        exact = "true" if usage.exact else "false"
        self._lost_tokens.labels(deployment, "input", exact).add(usage.input)
        self._lost_tokens.labels(deployment, "output", exact).add(usage.output)

    def _update_upstream(self, record: CallRecord, call: Call, times: Times) -> None:
        """Update the metrics of a call that was sent to an upstream."""
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
        if usage.exact and record.attempts[0].outcome != PREFILLED:  # then two caches have their part in it
            series.prefix_predicted.total += predicted_cached_tokens(record.attempts, record.deployment)
            series.prefix_reported.total += usage.cache_read

    def _request_series(
        self, operation: Operation | None, model: str, class_name: str, status: int, outcome: Outcome | None
    ) -> _RequestSeries:
        key = (operation, model, class_name, status, outcome)
        series = self._request_series_cache.get(key)
        if series is None:
            labels = (str(operation) if operation else names.OTHER, model, class_name)
            series = self._request_series_cache[key] = _RequestSeries(
                requests=self._requests.labels(*labels, str(status), str(outcome) if outcome else "rejected"),
                duration=self._duration.labels(*labels),
                ttft=self._ttft.labels(*labels),
                overhead=self._overhead.labels(labels[0]),
                queue_wait=self._queue_wait.labels(class_name),
            )
        return series

    def _upstream_series(self, call: Call, deployment: str) -> _UpstreamSeries:
        if call.policy is not self._loaded:  # a call that began before a reload
            return self._find_upstream_series(call, deployment)
        key = (call.operation, call.model_name, deployment)
        series = self._upstream_series_cache.get(key)
        if series is None:
            series = self._upstream_series_cache[key] = self._find_upstream_series(call, deployment)
        return series

    def _find_upstream_series(self, call: Call, deployment: str) -> _UpstreamSeries:
        target, model = call.policy.deployment(deployment), call.model_name
        gen_ai = (names.GEN_AI_OPERATIONS[call.operation], target.provider if target else names.OTHER, model)
        return _UpstreamSeries(
            duration=self._gen_ai_duration.labels(*gen_ai, ""),
            failed_duration=partial(self._gen_ai_duration.labels, *gen_ai),
            tokens=tuple([self._tokens.labels(model, kind) for kind in TOKEN_KINDS]),
            input=self._gen_ai_tokens.labels(*gen_ai, "input"),
            output=self._gen_ai_tokens.labels(*gen_ai, "output"),
            prefix_predicted=self._prefix_predicted.labels(deployment),
            prefix_reported=self._prefix_reported.labels(deployment),
        )

    def _counter(self, declared: CounterDeclaration) -> LabelledCounter:
        counter = LabelledCounter(declared.name, declared.help, declared.labels)
        self._registry.register(counter)
        return counter

    def _histogram(self, declared: HistogramDeclaration) -> LabelledHistogram:
        histogram = LabelledHistogram(declared.name, declared.help, declared.labels, declared.buckets)
        self._histograms.append(histogram)
        self._registry.register(histogram)
        return histogram


def _attempt_outcome(attempt: Attempt) -> str:
    """Return the receipt's outcome, but rare statuses by class (`status_4xx`): upstreams may send any number."""
    if attempt.outcome == "ok":
        return attempt.outcome
    kind, _, status = attempt.outcome.partition("_")
    if kind != "status" or status in ("", "429", "500", "502", "503", "504"):
        return attempt.outcome
    return f"status_{status[:1]}xx"
