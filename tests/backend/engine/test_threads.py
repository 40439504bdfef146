from __future__ import annotations

import pytest

from backend.engine import threads
from backend.engine.threads import choose_num_threads, num_cores
from backend.native import library


@pytest.mark.parametrize(
    ("seconds", "chosen"),
    [
        ({1: 1.0, 2: 0.5, 4: 0.4, 6: 0.38}, 4),
        ({1: 1.0, 2: 0.95, 4: 0.5, 6: 0.5}, 4),
        ({1: 1.0, 2: 3.0, 4: 5.0, 6: 9.0}, 1),
        ({1: 1.0, 2: 0.55, 4: 0.6, 6: 0.3}, 6),
    ],
)
def test_more_threads_are_used_if_they_pay_off(
    monkeypatch: pytest.MonkeyPatch, seconds: dict[int, float], chosen: int
) -> None:
    monkeypatch.setattr(threads, "_measure", lambda native, candidates: {n: seconds[n] for n in candidates})
    assert choose_num_threads(library.load() or pytest.skip("there is no compiler here"), 6) == chosen


def test_every_candidate_is_measured() -> None:
    native = library.load() or pytest.skip("there is no compiler here")
    measured = threads._measure(native, [1, 2])
    assert [*measured] == [1, 2]
    assert all(seconds > 0.0 for seconds in measured.values())
    assert choose_num_threads(native, 1) == 1
    assert num_cores() >= 1


def test_without_native_kernels_nothing_is_measured() -> None:
    assert choose_num_threads(None, 2) == 1
    assert choose_num_threads(None, 8) == 8
