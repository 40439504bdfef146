from __future__ import annotations

from collections import Counter

import pytest
import torch.nn.functional as F

from backend.engine import threads
from backend.engine.threads import (
    PAUSE_SECONDS,
    ROWS,
    ThreadChoice,
    choose_again,
    choose_num_threads,
    decide,
    num_cores,
)
from backend.native import library
from backend.ops import native as native_ops


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
def test_more_threads_are_used_if_they_pay_off(decode: dict[int, float], batch: dict[int, float], chosen: int) -> None:
    """For one sequence or for batches, and without a loss for the other."""
    choice = decide({count: (decode[count], batch[count]) for count in decode})
    assert choice.count == chosen
    assert "times the speed of 1" in choice.reason


def test_every_candidate_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice, however little time there is. The kernels multiply 16 rows, too, and not torch with its own threads."""
    native = library.load() or pytest.skip("there is no compiler here")
    monkeypatch.setattr(threads, "NUM_WEIGHTS", 2)
    monkeypatch.setattr(F, "linear", lambda *given: pytest.fail("torch multiplies"))
    called: list[tuple[int, int]] = []
    linear = native_ops.NativeOps.linear
    monkeypatch.setattr(
        native_ops.NativeOps,
        "linear",
        lambda ops, x, *given: called.append((ops.call.num_threads, len(x))) or linear(ops, x, *given),  # type: ignore[func-returns-value]
    )
    measured = threads._measure(native, [1, 2], 0.0)
    assert [*measured] == [1, 2]
    assert all(seconds > 0.0 for rows in measured.values() for seconds in rows)
    assert Counter(called) == {(count, rows): 2 * 2 for count in (1, 2) for rows in ROWS}


def test_only_near_numbers_are_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    native = library.load() or pytest.skip("there is no compiler here")
    measured: list[list[int]] = []

    def measure(native: object, candidates: list[int], budget_seconds: float) -> dict[int, tuple[float, ...]]:
        assert budget_seconds == PAUSE_SECONDS
        measured.append(candidates)
        return {count: (1.0 / count, 1.0) for count in candidates}

    monkeypatch.setattr(threads, "_measure", measure)
    assert choose_again(native, 12, 4).count == 8
    assert choose_again(native, 12, 1).count == 2
    assert choose_again(native, 12, 12).count == 12
    assert measured == [[2, 4, 8], [1, 2], [8, 12]]
    assert choose_again(native, 2, 12) == ThreadChoice(2, "2 cores are left")
    assert choose_num_threads(native, 1) == choose_again(native, 1, 1)
    assert num_cores() >= 1


def test_without_native_kernels_nothing_is_measured() -> None:
    assert choose_num_threads(None, 2).count == 1
    assert choose_num_threads(None, 8).count == 8
