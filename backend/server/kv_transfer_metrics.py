"""Prometheus metrics of block transfers between engines. An engine without `--kv-transfer` has none of them."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Histogram

from backend.kv_transfer.prefix_loader import Transfer
from backend.server.engine_metrics import ENGINE, LABELS

SECONDS_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


class KvTransferMetrics:
    """Counts loads and sent blocks. Use it on the event loop only."""

    def __init__(self, registry: CollectorRegistry, model_name: str) -> None:
        def counter(name: str, documentation: str) -> Counter:
            return Counter(name, documentation, LABELS, registry=registry).labels(model_name, ENGINE)

        self._labels = (model_name, ENGINE)
        self._loads = Counter(
            "warmpath:kv_loads",
            "Loads of KV blocks from other engines by outcome.",
            (*LABELS, "outcome"),
            registry=registry,
        )
        self._seconds = Histogram(
            "warmpath:kv_load_seconds",
            "Time that a request waited for KV blocks of another engine.",
            LABELS,
            registry=registry,
            buckets=SECONDS_BUCKETS,
        ).labels(*self._labels)
        self._blocks_loaded = counter("warmpath:kv_blocks_loaded", "KV blocks loaded from other engines.")
        self._bytes_loaded = counter("warmpath:kv_bytes_loaded", "Bytes of KV blocks loaded from other engines.")
        self._blocks_sent = counter("warmpath:kv_blocks_sent", "KV blocks sent to other engines.")
        self._bytes_sent = counter("warmpath:kv_bytes_sent", "Bytes of KV blocks sent to other engines.")

    def observe_load(self, transfer: Transfer, seconds: float) -> None:
        """Counts a load that has ended."""
        self._loads.labels(*self._labels, transfer.outcome.value).inc()
        self._seconds.observe(seconds)
        self._blocks_loaded.inc(transfer.num_blocks)
        self._bytes_loaded.inc(transfer.num_bytes)

    def count_sent(self, num_blocks: int, num_bytes: int) -> None:
        """Counts a batch that was sent."""
        self._blocks_sent.inc(num_blocks)
        self._bytes_sent.inc(num_bytes)
