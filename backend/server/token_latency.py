"""The histogram of inter-token latencies. It observes every token, so it is an array and not the client library's."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate

from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString


class TokenLatencies(Collector):
    """Histogram under the name `name`. Use it on the event loop only.

    `bounds`: upper bounds of the buckets in seconds, in ascending order, without infinity.
    """

    def __init__(self, name: str, documentation: str, labels: dict[str, str], bounds: Sequence[float]) -> None:
        self._name = name
        self._documentation = documentation
        self._labels = labels
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self._seconds = 0.0
        self._created = time.time()

    def observe(self, seconds: float, count: int) -> None:
        """Observes `count` tokens that arrived together, `seconds` after the previous ones, as if they came evenly."""
        self._counts[bisect_left(self._bounds, seconds / count)] += count
        self._seconds += seconds

    def collect(self) -> Iterator[Metric]:
        family = HistogramMetricFamily(self._name, self._documentation, labels=[*self._labels])
        bounds = [*map(floatToGoString, (*self._bounds, float("inf")))]
        buckets = list(zip(bounds, accumulate(self._counts), strict=True))
        family.add_metric([*self._labels.values()], buckets, self._seconds)
        family.add_sample(f"{self._name}_created", self._labels, self._created)
        yield family
