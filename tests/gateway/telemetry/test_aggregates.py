from bisect import bisect_left
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from gateway.telemetry.aggregates import HistogramSeries

BOUNDS = (0.5, 1.0, 2.0)


@given(st.lists(st.lists(st.sampled_from([0.0, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0]))))
def test_each_value_is_in_the_bucket_of_the_first_bound_that_is_not_below_it(fills: list[list[float]]) -> None:
    series, expected = HistogramSeries(BOUNDS), Counter[int]()
    for values in fills:
        for value in values:
            series.observe(value)
            expected[bisect_left(BOUNDS, value)] += 1
        series.fill_buckets()
    assert series.counts == [expected[bucket] for bucket in range(len(BOUNDS) + 1)]
    assert series.sum == sum(map(sum, fills))
