"""What answers teach about how calls slow each other down."""

from __future__ import annotations

import random

import pytest

from gateway.prefix.decode_speed import DecodeSpeed


def test_the_slowdown_is_learned_from_answers() -> None:
    speed, rng = DecodeSpeed(), random.Random(1)
    for _ in range(400):
        others, tokens = rng.uniform(0, 16), rng.randint(20, 180)
        speed.learn(tokens, tokens * (0.01 + 0.002 * others) * rng.uniform(0.8, 1.2), others)
    assert speed.slowdown_seconds == pytest.approx(0.002, rel=0.2)
    assert speed.mean_output_tokens == pytest.approx(100, rel=0.25)
    assert speed.slowdown_of(10) == pytest.approx(100 * 0.002 * 10, rel=0.4)


def test_without_neighbours_nothing_is_known_of_them() -> None:
    speed = DecodeSpeed()
    for _ in range(10):
        speed.learn(100, 1.0, 0.0)
    assert speed.slowdown_of(5) == 0


def test_answers_that_get_faster_with_neighbours_cost_nothing() -> None:
    speed = DecodeSpeed()
    for others in range(20):
        speed.learn(100, 2.0 - 0.05 * others, float(others))
    assert speed.slowdown_of(5) == 0


def test_rounding_errors_are_no_neighbours() -> None:
    """The mean number of other calls is computed from times, so it is rarely exactly 0."""
    speed, rng = DecodeSpeed(), random.Random(1)
    for _ in range(10):
        speed.learn(100, rng.uniform(0.9, 1.1), rng.choice((1e-16, 0.0, 1e-15, -1e-16)))
    assert speed.slowdown_of(1) == 0
