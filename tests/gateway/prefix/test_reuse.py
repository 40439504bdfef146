"""How likely conversations of some age continue."""

from __future__ import annotations

import random

import pytest

from gateway.prefix.reuse import ReuseCurve


def test_conversations_that_continue_at_once_or_never() -> None:
    curve, rng = ReuseCurve(), random.Random(1)
    for _ in range(5000):
        curve.note_call(rng.choice((0, 1, 2, 3, None)))
    assert curve.share(0) == pytest.approx(0.8, abs=0.05)
    assert curve.share(100) < 0.05


def test_old_conversations_that_continue_keep_their_worth() -> None:
    curve = ReuseCurve()
    for _ in range(5000):
        curve.note_call(60)
    assert curve.share(0) == pytest.approx(1.0, abs=0.01)
    assert curve.share(50) == pytest.approx(1.0, abs=0.01)
    assert curve.share(1000) < 0.2


def test_the_share_never_rises_above_one() -> None:
    curve = ReuseCurve()
    for age in range(3000):
        curve.note_call(age % 50)
        assert all(0 <= curve.share(each) <= 1 for each in (0, 10, 100, 10**9))
