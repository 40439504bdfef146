"""LeakyBucket: exact refunds, bounded troughs, and clocks that are late or set back."""

from __future__ import annotations

from fractions import Fraction

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.storage.base import RateCharge
from gateway.storage.leaky_bucket import MAX_TROUGHS, LeakyBucket, State

LIMIT, PERIOD_SECONDS = 16, 4.0
pours = st.tuples(st.just("pour"), st.integers(1, LIMIT), st.integers(0, 8))
settles = st.tuples(st.just("settle"), st.integers(0, LIMIT), st.integers(0, 6))


def charge(amount: int) -> RateCharge:
    return RateCharge("tenant/tokens", amount, LIMIT, PERIOD_SECONDS)


def level_of(history: list[tuple[float, int]], now: float) -> Fraction:
    """The definition: leak, then pour, over the whole history."""
    level, time = Fraction(0), Fraction(0)
    for poured_at, amount in [*history, (now, 0)]:
        leaked = (Fraction(poured_at) - time) * LIMIT / int(PERIOD_SECONDS)
        level, time = max(Fraction(0), level - leaked) + amount, Fraction(poured_at)
    return level


@settings(max_examples=500, derandomize=True, database=None)
@given(st.lists(pours | settles, min_size=5, max_size=MAX_TROUGHS))
def test_after_a_refund_the_bucket_is_as_if_only_the_usage_had_been_poured_in(
    steps: list[tuple[str, int, int]],
) -> None:
    bucket, now = LeakyBucket(), 1000.0
    history: list[tuple[float, int]] = []
    open_pours: list[tuple[int, float]] = []  # index in the history, and the bucket's time of the pouring
    for what, amount, number in steps:
        if what == "pour":
            now += number / 8
            if amount > bucket.room(charge(amount), now):
                assert bucket.pour(amount, charge(amount), now) < 0
                bucket.unpour(charge(amount))
            else:
                room = bucket.room(charge(amount), now)
                assert bucket.pour(amount, charge(amount), now) == pytest.approx(room - amount)
                open_pours.append((len(history), bucket.time))
                history.append((now, amount))
        elif number < len(open_pours):
            index, poured_at = open_pours.pop(-1 - number)
            reserved = history[index][1]
            used = min(amount, reserved)
            bucket.settle(used, charge(reserved), poured_at, now)
            history[index] = (history[index][0], used)
        assert int(bucket.room(charge(0), now)) == int(LIMIT - level_of(history, now))


def test_troughs_are_bounded_and_merging_them_only_makes_refunds_smaller() -> None:
    """The levels rise with every pouring, so no later level undercuts a trough."""
    bucket, big = LeakyBucket(), 10_000
    bucket.pour(100, RateCharge("t/x", 100, big, 1000.0), 0.0)
    first = bucket.time
    for second in range(1, 100):
        bucket.pour(20, RateCharge("t/x", 20, big, 1000.0), float(second))
        assert len(bucket.troughs) <= MAX_TROUGHS
    assert bucket.troughs == sorted(bucket.troughs)
    before = bucket.level
    bucket.settle(0, RateCharge("t/x", 100, big, 1000.0), first, 99.0)
    # The lowest level since was 90, just before the second pouring, so at most that is refunded.
    assert before - bucket.level <= 90


def test_a_caller_with_a_slightly_earlier_time_refills_nothing() -> None:
    bucket = LeakyBucket()
    bucket.pour(LIMIT, charge(LIMIT), 1000.0)
    assert int(bucket.room(charge(1), 996.0)) == 0
    bucket.pour(1, charge(1), 996.0)
    assert int(bucket.room(charge(1), 1001.0)) == LIMIT // 4 - 1


@pytest.mark.parametrize("back", [10.0, 5 * 3600.0])
def test_the_bucket_continues_from_the_time_to_which_the_clock_was_set_back(back: float) -> None:
    now, bucket = 1e6 - back, LeakyBucket()
    bucket.pour(LIMIT, charge(LIMIT), 1e6)
    assert int(bucket.room(charge(1), now)) == 0
    assert int(bucket.room(charge(1), now + 1.0)) == LIMIT // 4
    bucket.pour(1, charge(1), now + 1.0)
    assert int(bucket.room(charge(1), now + 2.0)) == 2 * (LIMIT // 4) - 1
    assert bucket.empty_at < now + 60.0


def test_an_amount_poured_in_before_the_clock_was_set_back_is_refunded_once() -> None:
    bucket = LeakyBucket()
    bucket.pour(LIMIT, charge(LIMIT), 1e6)
    first = bucket.time
    bucket.pour(0, charge(0), 1e6 + 1.0)  # after a quarter has leaked
    bucket.settle(0, charge(LIMIT), first, 1000.0)
    assert 0 <= bucket.level <= LIMIT
    assert bucket.troughs == sorted(bucket.troughs)
    assert int(bucket.room(charge(1), 1000.0)) <= LIMIT


def test_a_changed_limit_keeps_the_level() -> None:
    bucket = LeakyBucket()
    bucket.pour(10, charge(10), 1000.0)
    assert int(bucket.room(RateCharge("tenant/tokens", 1, 100, 100.0), 1000.0)) == 90


def test_the_stored_state_makes_an_equal_bucket() -> None:
    bucket = LeakyBucket()
    bucket.pour(3, charge(3), 1000.5)
    stored = msgspec.msgpack.encode(bucket.state)
    assert LeakyBucket(*msgspec.msgpack.decode(stored, type=State)).state == bucket.state
