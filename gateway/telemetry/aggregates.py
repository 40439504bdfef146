"""Counters and histograms for a single thread: the event loop updates them and reads them at each scrape.

The metrics of prometheus_client take a lock and several function calls per update. That suits programs with many
threads, but it would cost each request about 30 us. The classes of this module update a number or append to a list
instead. prometheus_client still writes the text format.

A metric with labels (`LabelledCounter`, `LabelledHistogram`) has one series per combination of label values. Callers
look a series up once and keep it.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Exemplar
from prometheus_client.utils import floatToGoString

from gateway.telemetry import names

SERIES_MAX = 2000  # label combinations of one metric; further ones are counted under "other"


class CounterSeries:
    """Value of a counter for one combination of labels."""

    __slots__ = ("total",)

    def __init__(self) -> None:
        self.total = 0.0

    def add(self, amount: float = 1) -> None:
        self.total += amount


class LabelledCounter(Collector):
    """A Prometheus counter with labels. `labels` are label names, separated by spaces."""

    def __init__(self, name: str, text: str, labels: str) -> None:
        self._name, self._text, self._labels = name, text, labels.split()
        self._series: dict[tuple[str, ...], CounterSeries] = {}

    def labels(self, *labels: str) -> CounterSeries:
        """The series of these label values. Callers that update it often keep it."""
        series = self._series.get(labels)
        if series is None:
            series = self._series.setdefault(_bounded(labels, self._series), CounterSeries())
        return series

    def describe(self) -> list[Metric]:
        return [CounterMetricFamily(self._name, self._text, labels=self._labels)]

    def collect(self) -> Iterator[Metric]:
        family = CounterMetricFamily(self._name, self._text, labels=self._labels)
        for labels, series in self._series.items():
            family.add_metric(labels, series.total)
        yield family


class HistogramSeries:
    """Buckets of a histogram for one combination of labels.

    `observe` is the `append` method of a list, which is fast, because each request observes several values.
    `fill_buckets` sorts the list into the buckets. The owner calls `fill_buckets` periodically to bound the list.
    """

    __slots__ = ("_bounds", "_unsorted", "counts", "exemplars", "observe", "sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._unsorted: list[float] = []
        self.observe = self._unsorted.append
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0
        self.exemplars: dict[int, Exemplar] = {}  # the last one of each bucket

    def exemplify(self, value: float, trace_id: int, time_ns: int) -> None:
        """Link the bucket of an observed value to a trace."""
        labels = {"trace_id": f"{trace_id:032x}"}
        self.exemplars[bisect_left(self._bounds, value)] = Exemplar(labels, value, time_ns / 1e9)

    def fill_buckets(self) -> None:
        """Sort the observed values into the buckets."""
        values, smaller = self._unsorted, 0
        self.sum += sum(values)
        values.sort()  # so that each bound is looked up once, and not each value
        for index, bound in enumerate(self._bounds):
            within = bisect_right(values, bound)
            self.counts[index] += within - smaller
            smaller = within
        self.counts[-1] += len(values) - smaller
        values.clear()


class LabelledHistogram(Collector):
    """A Prometheus histogram with labels.

    `labels` are label names, separated by spaces. `bounds` are the upper bounds of the buckets in ascending order; a
    last bucket without a bound is added. Only OpenMetrics has exemplars; the older text format omits them.
    """

    def __init__(self, name: str, text: str, labels: str, bounds: Sequence[float]) -> None:
        self._name, self._text, self._labels = name, text, labels.split()
        self._bounds = tuple(bounds)
        self._series: dict[tuple[str, ...], HistogramSeries] = {}

    def labels(self, *labels: str) -> HistogramSeries:
        """The series of these label values. Callers that update it often keep it."""
        series = self._series.get(labels)
        if series is None:
            series = self._series.setdefault(_bounded(labels, self._series), HistogramSeries(self._bounds))
        return series

    def fill_buckets(self) -> None:
        """Sort the observed values of all series into their buckets."""
        for series in self._series.values():
            series.fill_buckets()

    def describe(self) -> list[Metric]:
        return [HistogramMetricFamily(self._name, self._text, labels=self._labels)]

    def collect(self) -> Iterator[Metric]:
        family = HistogramMetricFamily(self._name, self._text, labels=self._labels)
        bounds = [floatToGoString(bound) for bound in (*self._bounds, float("inf"))]
        for labels, series in self._series.items():
            series.fill_buckets()
            cumulative = zip(bounds, itertools.accumulate(series.counts), strict=True)
            buckets = [
                (bound, float(count), series.exemplars[i]) if i in series.exemplars else (bound, float(count))
                for i, (bound, count) in enumerate(cumulative)
            ]
            family.add_metric(labels, buckets, series.sum)
        yield family


def _bounded(
    labels: tuple[str, ...], known: dict[tuple[str, ...], CounterSeries] | dict[tuple[str, ...], HistogramSeries]
) -> tuple[str, ...]:
    return labels if len(known) < SERIES_MAX else (names.OTHER,) * len(labels)
