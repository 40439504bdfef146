"""Sends the metrics to a collector with OTLP over HTTP, if `WARMPATH_OTLP_METRICS_SECONDS` is set.

The instruments are those of `/metrics`, under the same names, read at each export. Counters and histograms are
cumulative. A failed export loses nothing but its moment: the next one has the sums again. `otlp_metrics` is imported
only if it is used, because the SDK's exporter takes a quarter of a second to import.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    Gauge,
    Histogram,
    HistogramDataPoint,
    MetricExportResult,
    MetricsData,
    NumberDataPoint,
    ResourceMetrics,
    ScopeMetrics,
    Sum,
)
from opentelemetry.sdk.metrics.export import Metric as OTLPMetric
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from prometheus_client.core import Metric
from prometheus_client.samples import Sample

from gateway.telemetry import names

EXPORT_TIMEOUT_SECONDS = 5.0
CUMULATIVE = AggregationTemporality.CUMULATIVE

log = logging.getLogger(__name__)


class OTLPMetrics:
    """Exports what `collect` returns every `every_seconds`. Start `run` as a task; `close` sends the last values."""

    def __init__(
        self,
        otlp_endpoint: str,
        collect: Callable[[], Iterable[Metric]],
        *,
        every_seconds: float,
        version: str,
        replica: str = "",
        headers: Iterable[tuple[str, str]] = (),
    ) -> None:
        base = otlp_endpoint.rstrip("/").removesuffix("/v1/traces")
        self._exporter = OTLPMetricExporter(
            endpoint=f"{base}/v1/metrics", headers=dict(headers), timeout=EXPORT_TIMEOUT_SECONDS
        )
        self._collect = collect
        self._every_seconds = every_seconds
        service = {names.SERVICE_NAME: "warmpath-gateway", names.SERVICE_VERSION: version}
        self._resource = Resource.create(service | ({names.SERVICE_INSTANCE_ID: replica} if replica else {}))
        self._scope = InstrumentationScope("warmpath", version)
        self._started_ns = time.time_ns()
        self._failing = False

    async def run(self) -> None:
        """Export, forever. A failure is logged once until an export succeeds."""
        while True:
            await asyncio.sleep(self._every_seconds)
            await self.export()

    async def export(self) -> None:
        """Read all metrics on the event loop, and send them in a thread."""
        metrics = metrics_data(self._collect(), self._resource, self._scope, self._started_ns, time.time_ns())
        result = await asyncio.to_thread(self._exporter.export, metrics)
        failed = result is not MetricExportResult.SUCCESS
        if failed and not self._failing:
            log.warning("the metrics were not sent to the collector; further failures are not logged")
        self._failing = failed

    async def close(self) -> None:
        """Send the metrics once more, and close the connection."""
        await self.export()
        await asyncio.to_thread(self._exporter.shutdown)


def metrics_data(
    families: Iterable[Metric], resource: Resource, scope: InstrumentationScope, started_ns: int, now_ns: int
) -> MetricsData:
    """The families as OTLP metrics. `started_ns` is the time at which counters were zero."""
    metrics = [
        OTLPMetric(family.name, family.documentation, "", _data(family, started_ns, now_ns))
        for family in families
        if family.samples
    ]
    return MetricsData([ResourceMetrics(resource, [ScopeMetrics(scope, metrics, "")], "")])


def _data(family: Metric, started_ns: int, now_ns: int) -> Sum | Gauge | Histogram:
    if family.type == "histogram":
        return Histogram(list(_histogram_points(family.samples, started_ns, now_ns)), CUMULATIVE)
    is_counter = family.type == "counter"
    points = [
        NumberDataPoint(sample.labels, started_ns if is_counter else 0, now_ns, float(sample.value))
        for sample in family.samples
    ]
    return Sum(points, CUMULATIVE, is_monotonic=True) if is_counter else Gauge(points)


def _histogram_points(samples: Iterable[Sample], started_ns: int, now_ns: int) -> Iterator[HistogramDataPoint]:
    """One point for each series. Prometheus' buckets are cumulative, and those of OTLP are not."""
    for labels, group in itertools.groupby(samples, key=_labels_without_bound):
        series = list(group)
        buckets = [sample for sample in series if "le" in sample.labels]
        counts = [int(sample.value) for sample in buckets]
        total = next(sample.value for sample in series if sample.name.endswith("_sum"))
        unknown: Any = None  # neither least nor greatest value is kept
        yield HistogramDataPoint(
            attributes=labels,
            start_time_unix_nano=started_ns,
            time_unix_nano=now_ns,
            count=counts[-1],
            sum=total,
            bucket_counts=[after - before for before, after in itertools.pairwise((0, *counts))],
            explicit_bounds=[float(sample.labels["le"]) for sample in buckets[:-1]],
            min=unknown,
            max=unknown,
        )


def _labels_without_bound(sample: Sample) -> Mapping[str, str]:
    return {name: value for name, value in sample.labels.items() if name != "le"}
