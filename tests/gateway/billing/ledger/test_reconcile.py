"""Intervals between samples of the engines' counters, and the receipts of each interval."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from gateway.billing.ledger.engine_counters import CounterSample, intervals
from gateway.billing.ledger.reconcile import compare, drift_ratio, totals_by_deployment
from gateway.billing.ledger.rows import UnbilledWork
from gateway.core.ids import new_event_id
from tests.gateway.billing.ledger.receipts import a_correction, a_receipt, write_chain


def sample(hour: int, input_tokens: int, output_tokens: int, deployment: str = "a") -> CounterSample:
    return CounterSample(f"2026-11-20T{hour:02}:00:00.000000Z", deployment, "m", input_tokens, output_tokens)


SAMPLES = [sample(9, 1000, 100), sample(9, 5, 5, "b"), sample(10, 1100, 110), sample(11, 30, 8), sample(12, 90, 10)]


def test_an_interval_is_the_difference_of_two_samples() -> None:
    found = [
        (interval.since[11:13], interval.until[11:13], interval.input, interval.output, interval.restarted)
        for interval in intervals(SAMPLES)
    ]
    assert found == [("09", "10", 100, 10, False), ("10", "11", 30, 8, True), ("11", "12", 60, 2, False)]
    assert [interval.since[11:13] for interval in intervals(SAMPLES, since="2026-11-20T10")] == ["10", "11"]
    assert [interval.since[11:13] for interval in intervals(SAMPLES, until="2026-11-20T11:00:00.000000Z")] == [
        "09",
        "10",
    ]


def test_output_that_is_in_no_answer_is_subtracted() -> None:
    one = msgspec.structs.replace
    first, second = one(sample(9, 10, 100), unwanted=40), one(sample(10, 20, 130), unwanted=45)
    assert [(interval.output, interval.restarted) for interval in intervals([first, second])] == [(25, False)]
    late = one(sample(10, 20, 100), unwanted=43)  # computed before the first sample, but counted as unwanted after it
    assert [(interval.output, interval.restarted) for interval in intervals([first, late])] == [(-3, False)]
    restarted = one(sample(10, 20, 130), unwanted=1)
    assert [(interval.output, interval.restarted) for interval in intervals([first, restarted])] == [(129, True)]


def test_samples_of_two_gateways_on_the_hour_count_once() -> None:
    a_moment_later = {one: one.at.replace("00.000000Z", "00.012345Z") for one in SAMPLES}
    others = [msgspec.structs.replace(one, at=at, input=one.input + 1) for one, at in a_moment_later.items()]
    both = sorted([*SAMPLES, *others], key=lambda one: one.at)
    found = [(interval.since[11:13], interval.until[11:13], interval.input) for interval in intervals(both)]
    assert found == [("09", "10", 100), ("10", "11", 31), ("11", "12", 60)]


def test_a_receipt_counts_in_the_interval_in_which_its_call_ended(tmp_path: Path) -> None:
    counts: dict[str, Any] = {"input_uncached": 10, "cache_read": 80, "cache_write": 5, "output": 9, "reasoning": 0}
    first = a_receipt(**counts, deployment="a", finished="2026-11-20T09:00:00.000000Z")
    write_chain(
        tmp_path / "replica",
        [
            first,
            a_correction(first, output=1),
            a_receipt(**counts, deployment="a", finished="2026-11-20T10:00:00.000000Z"),
            a_receipt(**counts, deployment="a", finished="2026-11-20T12:00:00.000000Z"),
            a_receipt(**counts, deployment="b", finished="2026-11-20T09:30:00.000000Z"),
            UnbilledWork(
                event_id=new_event_id(),
                call_id="req_2",
                attempt=1,
                tenant="acme",
                key_id="k",
                model_asked="m",
                deployment="a",
                started="",
                finished="2026-11-20T11:30:00.000000Z",
                exact=True,
                trace_id="",
                **counts,
            ),
            a_receipt(**counts, deployment=None, source="cache", finished="2026-11-20T09:30:00.000000Z"),
        ],
    )
    compared = compare(tmp_path, intervals(SAMPLES))
    assert [(one.input, one.output) for one in compared] == [(95, 10), (95, 9), (0, 0)]
    assert [(one.unbilled_input, one.unbilled_output) for one in compared] == [(0, 0), (0, 0), (95, 9)]
    assert [(one.input_drift, one.output_drift) for one in compared] == [(5, 0), (-65, -1), (-35, -7)]
    (whole,) = totals_by_deployment(compared)
    assert (whole.interval.input, whole.input, whole.unbilled_input, whole.input_drift) == (190, 190, 95, -95)
    assert (whole.unbilled_output, whole.output_drift) == (9, -8)
    assert whole.interval.restarted


def test_the_drift_ratio() -> None:
    assert (drift_ratio(-1, 1000), drift_ratio(0, 0), drift_ratio(-5, 0)) == (0.001, 0.0, 1.0)
    assert compare(Path("nowhere"), []) == []
