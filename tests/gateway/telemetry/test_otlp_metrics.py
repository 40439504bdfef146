"""Metrics that are sent to a collector: the same values as in /metrics."""

from __future__ import annotations

from typing import Any

from gateway.telemetry import CallRecord, Telemetry
from gateway.telemetry.observable import INFLIGHT
from tests.otlp_collector import Collector


async def test_the_collector_gets_what_a_scrape_would_show(record: CallRecord, collector: Collector) -> None:
    telemetry = Telemetry(collector.url, replica="gw-1", otlp_headers=[("api-key", "k")], otlp_metrics_seconds=3600)
    telemetry.register(INFLIGHT, lambda: 3)
    await telemetry.start()
    telemetry.record(record)
    await telemetry.shutdown()
    (request,) = collector.metrics
    (resource,) = request.resource_metrics
    attributes = {item.key: item.value.string_value for item in resource.resource.attributes}
    assert (attributes["service.name"], attributes["service.instance.id"]) == ("warmpath-gateway", "gw-1")
    assert collector.headers[-1]["api-key"] == "k"
    metrics: dict[str, Any] = {metric.name: metric for metric in resource.scope_metrics[0].metrics}
    (inflight,) = metrics["warmpath_inflight"].gauge.data_points
    assert inflight.as_double == 3
    requests = metrics["warmpath_requests"].sum
    assert requests.is_monotonic and requests.aggregation_temporality == 2
    assert [point.as_double for point in requests.data_points] == [1]
    assert {a.key: a.value.string_value for a in requests.data_points[0].attributes}["model"] == "qwen3"
    (duration,) = metrics["warmpath_request_duration_seconds"].histogram.data_points
    assert (duration.count, round(duration.sum, 4), sum(duration.bucket_counts)) == (1, 0.0504, 1)
    assert len(duration.bucket_counts) == len(duration.explicit_bounds) + 1
    assert duration.explicit_bounds[list(duration.bucket_counts).index(1)] == 0.1
    assert not duration.HasField("min")


async def test_a_collector_that_rejects_metrics_stops_nothing(record: CallRecord, collector: Collector) -> None:
    collector.status = 400
    telemetry = Telemetry(collector.url, otlp_metrics_seconds=3600)
    await telemetry.start()
    telemetry.record(record)
    await telemetry.shutdown()
    assert len(collector.metrics) == 1


async def test_metrics_are_not_sent_by_default(record: CallRecord, collector: Collector) -> None:
    telemetry = Telemetry(collector.url)
    await telemetry.start()
    telemetry.record(record)
    await telemetry.shutdown()
    assert (len(collector.metrics), len(collector.requests)) == (0, 1)
