"""The histogram of inter-token latencies prints what the client library's histogram prints."""

from __future__ import annotations

import random
import re

import pytest
from prometheus_client import CollectorRegistry, Histogram, generate_latest

from backend.server.token_latency import TokenLatencies

BOUNDS = (0.001, 0.0025, 0.5, 1)
LABELS = {"model_name": "m", "engine": "0"}


def text_of(registry: CollectorRegistry) -> str:
    return re.sub(r"(_created\{.*\}) .*", r"\1", generate_latest(registry).decode())


def test_it_prints_what_the_histogram_of_the_library_prints(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prometheus_client.metrics._use_created", True)  # the gateway's metrics turn it off
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    latencies = TokenLatencies("gap_seconds", "Time.", LABELS, BOUNDS)
    ours.register(latencies)
    histogram = Histogram("gap_seconds", "Time.", [*LABELS], registry=theirs, buckets=BOUNDS).labels(*LABELS.values())
    assert text_of(ours) == text_of(theirs)
    draw = random.Random(1)
    for _ in range(200):
        seconds, count = draw.choice([0.0, 0.0625, 0.5, 1.0, 2.0, draw.randrange(1024) / 512]), draw.choice([1, 2, 4])
        latencies.observe(seconds, count)
        for _ in range(count):
            histogram.observe(seconds / count)
    assert text_of(ours) == text_of(theirs)
