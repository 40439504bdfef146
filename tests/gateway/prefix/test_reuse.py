"""How likely cached blocks of some age are used again."""

from __future__ import annotations

import random

import pytest

from gateway.prefix.reuse import ReuseCurve


def test_blocks_that_are_used_again_at_once_or_never() -> None:
    curve, rng = ReuseCurve(), random.Random(1)
    for _ in range(5000):
        curve.note_call(100, [(rng.randint(0, 3), 80)])
    assert curve.share(0) == pytest.approx(0.8, abs=0.05)
    assert curve.share(100) < 0.05


def test_old_blocks_that_are_used_again_keep_their_worth() -> None:
    curve = ReuseCurve()
    for _ in range(5000):
        curve.note_call(100, [(60, 100)])
    assert curve.share(0) == pytest.approx(1.0, abs=0.01)
    assert curve.share(50) == pytest.approx(1.0, abs=0.01)
    assert curve.share(1000) < 0.2


def test_a_beginning_that_all_prompts_have_says_little_about_the_rest() -> None:
    """It is always young. What gets old is what was used by one prompt only."""
    curve = ReuseCurve()
    for _ in range(5000):
        curve.note_call(100, [(1, 50)])
    assert curve.share(0) == pytest.approx(0.5, abs=0.05)
    assert curve.share(8) < 0.05


def test_the_share_is_between_0_and_1() -> None:
    curve = ReuseCurve()
    for age in range(3000):
        curve.note_call(10, [(age % 50, 10)])
        assert all(0 <= curve.share(each) <= 1 for each in (0, 10, 100, 10**9))


def test_old_calls_fade_however_many_there_were() -> None:
    curve = ReuseCurve()
    for _ in range(20_000):  # the weights are scaled back on the way
        curve.note_call(10, [(5, 10)])
    assert curve.share(5) == pytest.approx(1.0, abs=0.01)
    for _ in range(20_000):
        curve.note_call(10, [])
    assert curve.share(5) < 0.1
