"""Metrics that are read when somebody looks: other parts of the gateway know their values, and this is their list.

`gateway.telemetry.metrics` has the others, to which every request adds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Literal

import msgspec
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

Reading = float | Mapping[tuple[str, ...], float]


class Watched(msgspec.Struct, frozen=True):
    """A metric that is read when it is asked for: `Telemetry.watch` gives it a callback.

    The callback returns a number, or with `labels` a mapping from their values to numbers. It runs on the event
    loop, within GET /metrics.
    """

    name: str
    help: str
    labels: tuple[str, ...] = ()
    kind: Literal["gauge", "counter"] = "gauge"


class Watcher(Collector):
    """Asks for one metric whenever the registry is asked."""

    def __init__(self, metric: Watched, read: Callable[[], Reading]) -> None:
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


INFLIGHT = Watched("warmpath_inflight", "Requests that have been accepted and are not over.")
BODIES = Watched("warmpath_bodies_bytes", "Bytes of request bodies that are held, up to WARMPATH_MAX_BODIES_BYTES.")
QUEUE_DEPTH = Watched("warmpath_queue_depth", "Calls that wait for their turn.", ("class",))
DEPLOYMENT_INFLIGHT = Watched("warmpath_deployment_inflight", "Calls that a deployment is busy with.", ("deployment",))
DEPLOYMENT_AVAILABLE = Watched("warmpath_deployment_available", "1 where calls are sent, 0 where not.", ("deployment",))
LEDGER_ROWS = Watched("warmpath_ledger_rows", "Receipts written since the start.", kind="counter")
LEDGER_DRIFT = Watched(
    "warmpath_ledger_drift_tokens",
    "Tokens that the engine counted between the last two hourly notes, less those that this gateway has billed; of "
    "several workers, their sum.",
    ("deployment", "kind"),
)
LEDGER_OK = Watched("warmpath_ledger_ok", "1 while receipts can be written.")
LIMITS_LOST = Watched(
    "warmpath_limits_lost",
    "Leases that ran out while their calls went on, and settlements left to the end of theirs: the storage was away.",
    ("what",),
    kind="counter",
)
LIMITS_UNSETTLED = Watched("warmpath_limits_unsettled", "Ended reservations that the storage is still to be told of.")
LIMITS_LOCAL = Watched("warmpath_limits_local", "1 while the storage is away and limits are enforced by shares.")
LIMITS_LOCAL_CALLS = Watched(
    "warmpath_limits_local_calls", "Calls that were decided by a share of the limits.", ("verdict",), kind="counter"
)
LIMITS_UNTOLD = Watched("warmpath_limits_untold", "Calls granted by a share that the storage is still to be told of.")
STORE_FAILURES = Watched(
    "warmpath_limits_store_failures", "Operations on limits that the storage did not answer.", kind="counter"
)
KV_EVENT_BATCHES = Watched(
    "warmpath_kv_event_batches", "Batches of KV events, gaps in their numbers, and what was none.",
    ("deployment", "kind"), kind="counter",
)  # fmt: skip
GATEWAYS_HEARD = Watched("warmpath_gateways_heard", "Other gateways on the same storage that told their load lately.")
CALLS_HEARD = Watched(
    "warmpath_calls_heard", "Calls of other gateways that this one's cache models have learnt.", kind="counter"
)
KV_BLOCKS = Watched("warmpath_kv_blocks", "KV blocks that a deployment has told of, and not removed.", ("deployment",))
KV_CALLS = Watched(
    "warmpath_kv_calls", "Answered calls of deployments with KV events, by whether their blocks are known.",
    ("deployment", "blocks"), kind="counter",
)  # fmt: skip
DEPLOYMENT_BREAKER = Watched(
    "warmpath_deployment_breaker",
    "1 at the state in which a deployment's circuit breaker is: closed, resting, open or half_open.",
    ("deployment", "state"),
)
CUT_STREAMS = Watched(
    "warmpath_cut_streams", "Streams that were cut and were to go on at another deployment, by whether they did.",
    ("result",), kind="counter",
)  # fmt: skip
QUEUE_GAVE_WAY = Watched(
    "warmpath_queue_gave_way", "Calls that were refused because more had come than may wait, by the class of theirs.",
    ("class",), kind="counter",
)  # fmt: skip
BATCHES = Watched("warmpath_batches", "Batches in the store that are not over, as they were found last.", ("status",))
BATCHES_ENDED = Watched("warmpath_batches_ended", "Batches that this gateway has ended.", ("status",), kind="counter")
BATCH_LINES = Watched(
    "warmpath_batch_lines", "Lines that wait or are called, of the batches that this gateway works on.", ("state",)
)
RESPONSES_KEPT = Watched(
    "warmpath_responses_kept", "Responses that were to be kept, by what has become of that.", ("outcome",),
    kind="counter",
)  # fmt: skip
DEPLOYMENT_REPORTED = Watched(
    "warmpath_deployment_reported", "What a deployment said of its load last.", ("deployment", "what")
)
SPANS_DROPPED = Watched("warmpath_spans_dropped", "Spans that never reached the collector.", kind="counter")
