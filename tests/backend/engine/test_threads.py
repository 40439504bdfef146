from __future__ import annotations

import pytest

from backend.engine import threads
from backend.engine.threads import choose_num_threads, num_cores
from backend.native import library


@pytest.mark.parametrize(
    ("decode", "batch", "chosen"),
    [
        ({1: 1.0, 2: 0.5, 4: 0.4, 6: 0.38}, {1: 1.0, 2: 1.0, 4: 1.0, 6: 1.0}, 4),
        ({1: 1.0, 2: 0.95, 4: 0.5, 6: 0.5}, {1: 1.0, 2: 1.0, 4: 1.0, 6: 1.0}, 4),
        ({1: 1.0, 2: 3.0, 4: 5.0, 6: 9.0}, {1: 1.0, 2: 1.0, 4: 1.0, 6: 1.0}, 1),
        ({1: 1.0, 2: 0.55, 4: 0.6, 6: 0.3}, {1: 1.0, 2: 1.0, 4: 1.0, 6: 1.0}, 6),
        ({1: 1.0, 2: 0.98, 4: 1.0, 6: 1.0}, {1: 1.0, 2: 0.5, 4: 0.5, 6: 0.5}, 2),
        ({1: 1.0, 2: 1.5, 4: 2.0, 6: 2.0}, {1: 1.0, 2: 0.5, 4: 0.3, 6: 0.2}, 1),
    ],
)
def test_more_threads_are_used_if_they_pay_off(
    monkeypatch: pytest.MonkeyPatch, decode: dict[int, float], batch: dict[int, float], chosen: int
) -> None:
    """For one sequence or for batches, and without a loss for the other."""
    seconds = {count: (decode[count], batch[count]) for count in decode}
    monkeypatch.setattr(threads, "_measure", lambda native, candidates: seconds)
    choice = choose_num_threads(library.load() or pytest.skip("there is no compiler here"), 6)
    assert choice.count == chosen
    assert "one thread's speed" in choice.reason


def test_every_candidate_is_measured() -> None:
    native = library.load() or pytest.skip("there is no compiler here")
    measured = threads._measure(native, [1, 2])
    assert [*measured] == [1, 2]
    assert all(seconds > 0.0 for rows in measured.values() for seconds in rows)
    assert choose_num_threads(native, 1).count == 1
    assert num_cores() >= 1


def test_without_native_kernels_nothing_is_measured() -> None:
    assert choose_num_threads(None, 2).count == 1
    assert choose_num_threads(None, 8).count == 8
