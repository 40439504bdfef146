"""Counters and histograms that are added to by one thread, the event loop's, and read by it when they are asked for.

prometheus_client's own take a lock and several calls for each update, which is right for many threads and costs a
request some 30 us here; these are a number and a list, and the library still writes the text.
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


class Count:
    """A counter's value for one combination of labels."""

    __slots__ = ("total",)

    def __init__(self) -> None:
        self.total = 0.0

    def add(self, amount: float = 1) -> None:
        self.total += amount


class Tally(Collector):
    """A counter with labels."""

    def __init__(self, name: str, text: str, labels: str) -> None:
        self._name, self._text, self._labels = name, text, labels.split()
        self._counts: dict[tuple[str, ...], Count] = {}

    def of(self, *labels: str) -> Count:
        """The value for these labels, to be kept by whoever adds to it often."""
        count = self._counts.get(labels)
        return count if count is not None else self._counts.setdefault(_bounded(labels, self._counts), Count())

    def describe(self) -> list[Metric]:
        return [CounterMetricFamily(self._name, self._text, labels=self._labels)]

    def collect(self) -> Iterator[Metric]:
        family = CounterMetricFamily(self._name, self._text, labels=self._labels)
        for labels, count in self._counts.items():
            family.add_metric(labels, count.total)
        yield family


class Spread:
    """A histogram's buckets for one combination of labels. `observe` is a list's own `append`, since every request has
    several values to tell; they come into their buckets with `sort_in`, which whoever observes calls now and then.
    """

    __slots__ = ("_bounds", "_new", "counts", "observe", "sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._new: list[float] = []
        self.observe = self._new.append
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def sort_in(self) -> None:
        for value in self._new:
            self.counts[bisect_left(self._bounds, value)] += 1
        self.sum += sum(self._new)
        self._new.clear()


class Histogram(Collector):
    """A histogram with labels. `bounds` are the upper bounds of its buckets, rising; one more has none."""

    def __init__(self, name: str, text: str, labels: str, bounds: Sequence[float]) -> None:
        self._name, self._text, self._labels = name, text, labels.split()
        self._bounds = tuple(bounds)
        self._spreads: dict[tuple[str, ...], Spread] = {}

    def of(self, *labels: str) -> Spread:
        """The buckets for these labels, to be kept by whoever observes often."""
        spread = self._spreads.get(labels)
        if spread is None:
            spread = self._spreads.setdefault(_bounded(labels, self._spreads), Spread(self._bounds))
        return spread

    def sort_in(self) -> None:
        for spread in self._spreads.values():
            spread.sort_in()

    def describe(self) -> list[Metric]:
        return [HistogramMetricFamily(self._name, self._text, labels=self._labels)]

    def collect(self) -> Iterator[Metric]:
        family = HistogramMetricFamily(self._name, self._text, labels=self._labels)
        bounds = [floatToGoString(bound) for bound in (*self._bounds, float("inf"))]  # type: ignore[no-untyped-call]
        for labels, spread in self._spreads.items():
            spread.sort_in()
            cumulated = zip(bounds, itertools.accumulate(spread.counts), strict=True)
            family.add_metric(labels, [(bound, float(count)) for bound, count in cumulated], spread.sum)
        yield family


def _bounded(
    labels: tuple[str, ...], known: dict[tuple[str, ...], Count] | dict[tuple[str, ...], Spread]
) -> tuple[str, ...]:
    return labels if len(known) < CHILDREN_MAX else (names.OTHER,) * len(labels)
