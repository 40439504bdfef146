"""Counters and histograms that are added to by one thread, the event loop's, and read by it when they are asked for.

prometheus_client's own take a lock and several calls for each update, which is right for many threads and costs a
request some 30 us here; these are a dictionary and a list, and the library still writes the text.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Iterator, Sequence

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from gateway.telemetry import names

CHILDREN_MAX = 2000  # label combinations of one metric; what comes later is counted under "other"


class Tally(Collector):
    """A counter with labels."""

    def __init__(self, name: str, text: str, labels: str) -> None:
        self._name, self._text, self._labels = name, text, labels.split()
        self._totals: dict[tuple[str, ...], float] = {}

    def add(self, *labels: str, amount: float = 1) -> None:
        totals = self._totals
        if labels in totals:
            totals[labels] += amount
        else:
            labels = _bounded(labels, totals)
            totals[labels] = totals.get(labels, 0) + amount

    def describe(self) -> list[Metric]:
        return [CounterMetricFamily(self._name, self._text, labels=self._labels)]

    def collect(self) -> Iterator[Metric]:
        family = CounterMetricFamily(self._name, self._text, labels=self._labels)
        for labels, total in self._totals.items():
            family.add_metric(labels, total)
        yield family


class _Spread:
    __slots__ = ("counts", "sum")

    def __init__(self, buckets: int) -> None:
        self.counts = [0] * buckets
        self.sum = 0.0


class Histogram(Collector):
    """A histogram with labels. `bounds` are the upper bounds of its buckets, rising; one more has none."""

    def __init__(self, name: str, text: str, labels: str, bounds: Sequence[float]) -> None:
        self._name, self._text, self._labels = name, text, labels.split()
        self._bounds = tuple(bounds)
        self._spreads: dict[tuple[str, ...], _Spread] = {}

    def observe(self, *labels: str, value: float) -> None:
        spread = self._spreads.get(labels)
        if spread is None:
            spread = self._spreads.setdefault(_bounded(labels, self._spreads), _Spread(len(self._bounds) + 1))
        spread.counts[bisect_left(self._bounds, value)] += 1
        spread.sum += value

    def describe(self) -> list[Metric]:
        return [HistogramMetricFamily(self._name, self._text, labels=self._labels)]

    def collect(self) -> Iterator[Metric]:
        family = HistogramMetricFamily(self._name, self._text, labels=self._labels)
        bounds = [floatToGoString(bound) for bound in (*self._bounds, float("inf"))]  # type: ignore[no-untyped-call]
        for labels, spread in self._spreads.items():
            cumulated = zip(bounds, itertools.accumulate(spread.counts), strict=True)
            family.add_metric(labels, [(bound, float(count)) for bound, count in cumulated], spread.sum)
        yield family


def _bounded(
    labels: tuple[str, ...], known: dict[tuple[str, ...], float] | dict[tuple[str, ...], _Spread]
) -> tuple[str, ...]:
    return labels if len(known) < CHILDREN_MAX else (names.OTHER,) * len(labels)
