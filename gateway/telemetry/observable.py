"""Observable metrics: gauges and counters whose values are read from other components when Prometheus scrapes.

This module declares each metric once: name, help text, labels and type. The component that knows the value registers
a callback for it with `Telemetry.register`, which runs at each scrape (`gateway/server/gauges.py` registers them all).
OpenTelemetry calls such instruments observable. `gateway/telemetry/metrics.py` has the metrics that requests update.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Literal

import msgspec
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

Reading = float | Mapping[tuple[str, ...], float]
"""What a callback returns: one number, or numbers by label values."""


class ObservableMetric(msgspec.Struct, frozen=True):
    """Declaration of a gauge or counter that is read by a callback.

    The callback returns a number, or, if the metric has `labels`, a mapping from tuples of label values to numbers. It
    runs on the event loop, within GET /metrics.
    """

    name: str
    help: str
    labels: tuple[str, ...] = ()
    kind: Literal["gauge", "counter"] = "gauge"


class ObservableCollector(Collector):
    """Prometheus collector of one observable metric: calls its callback at each scrape."""

    def __init__(self, metric: ObservableMetric, read: Callable[[], Reading]) -> None:
        self._metric = metric
        self._read = read

    def describe(self) -> list[Metric]:
        return [self._family()]

    def collect(self) -> Iterator[Metric]:
        family = self._family()
        reading = self._read()
        for values, number in reading.items() if isinstance(reading, Mapping) else [((), reading)]:
            family.add_metric(values, number)
        yield family

    def _family(self) -> CounterMetricFamily | GaugeMetricFamily:
        family = CounterMetricFamily if self._metric.kind == "counter" else GaugeMetricFamily
        return family(self._metric.name, self._metric.help, labels=self._metric.labels)


# Metric and label names are an interface: dashboards and alerts of users contain them.

POLICY_FILE_OK = ObservableMetric(
    "warmpath_policy_file_ok", "1 if the policy file was valid when it was last read, 0 if an older policy is in force."
)
INFLIGHT = ObservableMetric("warmpath_inflight", "Requests in flight: accepted, and the reply has not ended.")
BODIES = ObservableMetric(
    "warmpath_bodies_bytes", "Bytes of request bodies held in memory. The bound is WARMPATH_MAX_BODIES_BYTES."
)
QUEUE_DEPTH = ObservableMetric("warmpath_queue_depth", "Queued calls.", ("class",))
QUEUE_OLDEST = ObservableMetric(
    "warmpath_queue_oldest_seconds", "How long the oldest queued call has waited. 0 if no call is queued.", ("class",)
)
DEPLOYMENT_INFLIGHT = ObservableMetric(
    "warmpath_deployment_inflight", "Calls in flight at a deployment.", ("deployment",)
)
DEPLOYMENT_AVAILABLE = ObservableMetric(
    "warmpath_deployment_available", "1 if calls are sent to the deployment, 0 if not.", ("deployment",)
)
DISCOVERY_INSTANCES = ObservableMetric(
    "warmpath_discovery_instances", "Servers in use that the source of a template has named.", ("deployment",)
)
DISCOVERY_UP = ObservableMetric(
    "warmpath_discovery_up",
    "1 if the source of a template was read, 0 if it cannot be read and its last list stays in use.",
    ("deployment",),
)
DISCOVERY_CHANGES = ObservableMetric(
    "warmpath_discovery_changes", "Changes of a template's servers.", ("deployment",), kind="counter"
)
DISCOVERY_FAILURES = ObservableMetric(
    "warmpath_discovery_failures", "Failed reads of a template's source.", ("deployment",), kind="counter"
)
MIRRORED = ObservableMetric(
    "warmpath_mirrored",
    "Calls chosen for mirroring, by outcome: compared; busy, unavailable or unsupported if no copy was sent; or how "
    "the copy failed.",
    ("model", "deployment", "outcome"),
    kind="counter",
)
MIRROR_DIFFERENT = ObservableMetric(
    "warmpath_mirror_different",
    "Compared calls whose text, input tokens or output tokens differ from the client's answer.",
    ("model", "deployment", "what"),
    kind="counter",
)
MIRROR_SECONDS = ObservableMetric(
    "warmpath_mirror_seconds",
    "Sum of the durations of compared calls: the client's answer and the mirror's. The client's includes the queue.",
    ("model", "deployment", "side"),
    kind="counter",
)
MIRROR_TTFT = ObservableMetric(
    "warmpath_mirror_ttft_seconds",
    "Sum of the times to the first token of compared calls.",
    ("model", "deployment", "side"),
    kind="counter",
)
MIRROR_TOKENS = ObservableMetric(
    "warmpath_mirror_output_tokens",
    "Sum of the output tokens of compared calls.",
    ("model", "deployment", "side"),
    kind="counter",
)
HOOK_RUNS = ObservableMetric(
    "warmpath_hook_runs",
    "Runs of the policy's hooks, by outcome: ok, rejected or failed.",
    ("hook", "outcome"),
    kind="counter",
)
USAGE_IMPLAUSIBLE = ObservableMetric(
    "warmpath_usage_implausible",
    "Replies whose token counts were impossible, so that their calls were billed by an estimate.",
    ("deployment",), kind="counter",
)  # fmt: skip
LEDGER_ROWS = ObservableMetric("warmpath_ledger_rows", "Receipts written since the start.", kind="counter")
LEDGER_DRIFT = ObservableMetric(
    "warmpath_ledger_drift_tokens",
    "Tokens that the engine counted between the last two hourly samples, minus the tokens that this gateway billed. "
    "If the gateway has several workers, the sum over all of them.",
    ("deployment", "kind"),
)
LEDGER_COUNTED = ObservableMetric(
    "warmpath_ledger_counted_tokens",
    "Tokens that the engine counted between the last two hourly samples. The drift is a part of them.",
    ("deployment", "kind"),
)
LEDGER_LAG = ObservableMetric(
    "warmpath_ledger_lag_seconds",
    "How long the oldest rows have waited. durable: for their fsync. shipped: to be sent to Redis, if rows are.",
    ("stage",),
)
BUDGET_SPENT = ObservableMetric(
    "warmpath_budget_spent_ratio",
    "Spent and reserved share of a budget, read from the storage every ten seconds by one worker of each gateway. "
    "Only the 200 budgets that are spent most.",
    ("tenant", "scope", "period"),
)
BUDGET_LEFT = ObservableMetric(
    "warmpath_budget_left",
    "What remains of a budget, in units of the currency. The same budgets as in warmpath_budget_spent_ratio.",
    ("tenant", "scope", "period", "currency"),
)
BUDGET_FORECAST = ObservableMetric(
    "warmpath_budget_forecast_ratio",
    "Share of a budget that will be spent at the end of its period, by linear extrapolation of the spend so far. Shown "
    "after a tenth of the period, for the budgets of warmpath_budget_spent_ratio.",
    ("tenant", "scope", "period"),
)
SPEND_PACE = ObservableMetric(
    "warmpath_spend_pace_ratio",
    "Spend of a budget in the hour in progress (UTC), as a multiple of the usual spend of that hour. Shown once the "
    "usual spend is known, for the 200 budgets with the highest values. Webhooks warn above `unusual_at`.",
    ("tenant", "scope"),
)
WEBHOOKS = ObservableMetric(
    "warmpath_webhooks", "Webhooks sent, or dropped after all attempts.", ("outcome",), "counter"
)
LEDGER_OK = ObservableMetric("warmpath_ledger_ok", "1 while receipts can be written, otherwise 0.")
LIMITS_LOST = ObservableMetric(
    "warmpath_limits_lost",
    "Leases that expired while their call was in flight, and settlements dropped or failed, so that the reservation "
    "stands until its lease expires. Both happen if the storage is unavailable for long. A settlement may also fail "
    "because of a bug, which the log shows.",
    ("what",),
    kind="counter",
)
LIMITS_UNSETTLED = ObservableMetric(
    "warmpath_limits_unsettled", "Ended reservations whose settlement has not reached the storage yet."
)
LIMITS_LOCAL = ObservableMetric(
    "warmpath_limits_local", "1 while the storage is unavailable and the gateway enforces its share of the limits."
)
LIMITS_LOCAL_CALLS = ObservableMetric(
    "warmpath_limits_local_calls",
    "Calls decided by the gateway's share of the limits, because the storage was unavailable.",
    ("verdict",),
    kind="counter",
)
LIMITS_UNREPORTED = ObservableMetric(
    "warmpath_limits_untold", "Calls granted by the gateway's share of the limits and not reported to the storage yet."
)
LIMITS_STORAGE_FAILURES = ObservableMetric(
    "warmpath_limits_store_failures", "Operations on limits that failed because the storage did not answer.",
    kind="counter",
)  # fmt: skip
KV_EVENT_BATCHES = ObservableMetric(
    "warmpath_kv_event_batches", "KV event messages: batches received, gaps in their numbering, malformed messages.",
    ("deployment", "kind"), kind="counter",
)  # fmt: skip
PEER_GATEWAYS = ObservableMetric(
    "warmpath_gateways_heard", "Peer gateways: other gateways on the same storage that reported their load recently."
)
PEER_CALLS_LEARNED = ObservableMetric(
    "warmpath_calls_heard", "Calls of peer gateways that were added to this gateway's cache models.", kind="counter"
)
KV_BLOCKS = ObservableMetric(
    "warmpath_kv_blocks", "KV blocks that a deployment reported as stored, and not as removed.", ("deployment",)
)
KV_CALLS = ObservableMetric(
    "warmpath_kv_calls", "Answered calls of deployments with KV events, by whether their blocks are known.",
    ("deployment", "blocks"), kind="counter",
)  # fmt: skip
DEPLOYMENT_BREAKER = ObservableMetric(
    "warmpath_deployment_breaker",
    "1 for the current state of a deployment's circuit breaker: closed, resting, open or half_open.",
    ("deployment", "state"),
)
CUT_STREAMS = ObservableMetric(
    "warmpath_cut_streams", "Cut streams that were to resume on another deployment, by whether they did.",
    ("result",), kind="counter",
)  # fmt: skip
QUEUE_SHED = ObservableMetric(
    "warmpath_queue_gave_way", "Calls shed from the queue because more calls arrived than may wait, by their class.",
    ("class",), kind="counter",
)  # fmt: skip
BATCHES = ObservableMetric(
    "warmpath_batches", "Unfinished batches in the batch store, as of its last read.", ("status",)
)
BATCHES_ENDED = ObservableMetric(
    "warmpath_batches_ended", "Batches that this gateway ended.", ("status",), kind="counter"
)
BATCH_LINES = ObservableMetric(
    "warmpath_batch_lines", "Waiting and running lines of the batches that this gateway processes.", ("state",)
)
RESPONSES_STORED = ObservableMetric(
    "warmpath_responses_kept", "Responses that the policy says to store, by what happened to them.", ("outcome",),
    kind="counter",
)  # fmt: skip
IDEMPOTENCY = ObservableMetric(
    "warmpath_idempotent_requests", "Requests with an idempotency key, by what happened to them.", ("outcome",),
    kind="counter",
)  # fmt: skip
DEPLOYMENT_REPORTED = ObservableMetric(
    "warmpath_deployment_reported", "Load that a deployment reported last.", ("deployment", "what")
)
TASK_FAILURES = ObservableMetric(
    "warmpath_task_failures", "Failures of background tasks, after which they were restarted.", ("task",), "counter"
)
TASKS_DOWN = ObservableMetric(
    "warmpath_task_down", "1 while a background task keeps failing, for each task that has ever failed.", ("task",)
)
SPANS_DROPPED = ObservableMetric("warmpath_spans_dropped", "Spans that did not reach the collector.", kind="counter")
