"""Phase 9: traces, metrics and logs. The only package that imports OpenTelemetry or the Prometheus client.

While a request runs, only the times of its phases are recorded (`PhaseTimings`). After the reply, `Telemetry.record`
takes the request's `CallRecord`, updates metrics, builds spans, stores the call for the dashboard and writes the access
log. Whether a request is traced is decided when it begins. Metrics are updated in either case.

Begin at `record.py`. `metrics.py` updates the metrics that `request_metrics.py` declares, and `observable.py` declares
those that are read from other components. `tenants.py` has those by tenant, whose labels are bounded. `spans.py` builds
spans, `otlp.py` encodes them, `export.py` sends them, and `otlp_metrics.py` sends metrics. `propagation.py` implements
W3C Trace Context, `names.py` lists all names, `logs.py` formats log lines, and `recent_calls.py` keeps the last calls.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from gateway import __version__
from gateway.core.supervision import SupervisedTask, Supervisor
from gateway.policy import Policy
from gateway.telemetry import propagation
from gateway.telemetry.export import EXPORT_INTERVAL_SECONDS, SpanQueue
from gateway.telemetry.logs import access, configure_logging
from gateway.telemetry.metrics import NAMED_TENANTS, Metrics
from gateway.telemetry.observable import SPANS_DROPPED, ObservableMetric, Reading
from gateway.telemetry.recent_calls import RecentCalls
from gateway.telemetry.record import CallRecord, Times, phases, times

if TYPE_CHECKING:
    from gateway.telemetry.otlp_metrics import OTLPMetrics
    from gateway.telemetry.spans import SpanBuilder

logger = logging.getLogger(__name__)


class Telemetry:
    """Traces, metrics and logs of one gateway process. Not thread-safe: used on the event loop only.

    `replica` distinguishes several gateways in traces. `otlp_endpoint` is the base URL of a collector, as in
    http://localhost:4318; with None, no spans are sent. The SDK adds OTEL_RESOURCE_ATTRIBUTES to the spans' resource.
    `recent` stores the last calls for the admin API. `named_tenants` is the number of tenants with their own label.
    `otlp_metrics_seconds` is the interval in which metrics are sent to the collector, too; with None, they are not.
    """

    begin = staticmethod(propagation.begin)
    new_span_id = staticmethod(propagation.new_span_id)
    outgoing = staticmethod(propagation.outgoing)

    def __init__(
        self,
        otlp_endpoint: str | None = None,
        *,
        replica: str = "",
        otlp_headers: Iterable[tuple[str, str]] = (),
        export_interval_seconds: float = EXPORT_INTERVAL_SECONDS,
        recent: RecentCalls | None = None,
        supervisor: Supervisor | None = None,
        named_tenants: int = NAMED_TENANTS,
        otlp_metrics_seconds: float | None = None,
    ) -> None:
        self._metrics = Metrics(named_tenants=named_tenants)
        self._recent = recent
        self._spans: SpanQueue | None = None
        if otlp_endpoint:
            # Imported here, only if it is used: protobuf and the SDK take 3 MiB.
            spans = importlib.import_module("gateway.telemetry.spans")
            self._builder: SpanBuilder = spans.SpanBuilder(__version__, replica)
            self._spans = SpanQueue(
                otlp_endpoint,
                self._builder.envelope,
                headers=otlp_headers,
                interval_seconds=export_interval_seconds,
                supervisor=supervisor,
            )
        self._supervisor = supervisor or Supervisor()
        self._otlp_metrics: OTLPMetrics | None = None
        self._exporting: SupervisedTask | None = None
        if otlp_endpoint and otlp_metrics_seconds is not None:
            # Imported here, only if it is used: the SDK's exporter takes a quarter of a second to import.
            self._otlp_metrics = importlib.import_module("gateway.telemetry.otlp_metrics").OTLPMetrics(
                otlp_endpoint,
                self._metrics.collect,
                every_seconds=otlp_metrics_seconds,
                version=__version__,
                replica=replica,
                headers=otlp_headers,
            )
        self._metrics.register(SPANS_DROPPED, lambda: self._spans.dropped if self._spans else 0)

    async def start(self) -> None:
        """Start the export of spans and metrics."""
        if self._spans is not None:
            self._spans.start()
        if self._otlp_metrics is not None:
            self._exporting = self._supervisor.start("metrics export", self._otlp_metrics.run)

    async def shutdown(self) -> None:
        """Send the queued spans and the last metrics, within a time limit. Safe to call twice, and without `start`."""
        if self._spans is not None:
            await self._spans.close()
        exporting, self._exporting = self._exporting, None
        if exporting is not None and self._otlp_metrics is not None:
            await exporting.cancel()
            await self._otlp_metrics.close()

    def record(self, record: CallRecord) -> None:
        """Record a finished request. Never raises: errors are counted and logged."""
        try:
            self._record(record)
        except Exception:  # the reply is sent: an error here must not close the connection or stop later work
            self._metrics.failures.inc()
            logger.exception("telemetry of a request failed", extra=_ids(record))

    def _record(self, record: CallRecord) -> None:
        durations = times(record.timings, record.attempts)
        self._metrics.update(record, durations)
        if record.trace.sampled and self._spans is not None:
            self._spans.put(self._builder.build(record, phases(record.timings, record.attempts)))
            self._metrics.add_exemplars(record, durations)
        if self._recent is not None:
            self._recent.add(record)
        if access.isEnabledFor(logging.INFO):
            access.info("%s %s %d", record.method, record.path, record.status, extra=_access_fields(record, durations))

    def register(self, metric: ObservableMetric, read: Callable[[], Reading]) -> None:
        """Register the callback of an observable metric. It runs on the event loop at each scrape.

        Raises `ValueError` if the metric is registered already.
        """
        self._metrics.register(metric, read)

    def policy_loaded(self, policy: Policy) -> None:
        """Count a reload, and show the new policy's hash in the metrics."""
        self._metrics.policy_loaded(policy)

    def policy_rejected(self) -> None:
        """Count a reload that was rejected."""
        self._metrics.policy_rejected()

    def render_metrics(self, accept: str = "") -> tuple[bytes, str]:
        """The metrics as text, and the content type. `accept` is the request's header; it may ask for OpenMetrics."""
        return self._metrics.render(accept)


def _ids(record: CallRecord) -> dict[str, object]:
    return {"trace_id": f"{record.trace.trace_id:032x}", "call_id": record.call_id}


def _access_fields(record: CallRecord, durations: Times) -> dict[str, object]:
    timings, usage = record.timings, record.usage
    fields = _ids(record) | {
        "method": record.method,
        "path": record.path,
        "status": record.status,
        "error_code": record.error_code,
        "cache": record.cache,
        "deployment": record.deployment,
        "event_id": record.event_id,
        "duration_ms": round(durations.whole / 1e6, 3),
    }
    if record.principal is not None:
        fields |= {"tenant": record.principal.tenant_name, "key_id": record.principal.key_id}
    if record.call is not None:
        fields |= {"model": record.call.model_name, "class": record.call.class_name}
    if record.outcome is not None:
        fields["outcome"] = record.outcome.value
    if timings.first_chunk_ns:
        fields["ttft_ms"] = round((timings.first_chunk_ns - timings.started_ns) / 1e6, 3)
    if usage is not None:
        fields |= {"input_tokens": usage.input, "cached_tokens": usage.cache_read, "output_tokens": usage.output}
    return fields


__all__ = ["CallRecord", "RecentCalls", "Telemetry", "configure_logging"]
