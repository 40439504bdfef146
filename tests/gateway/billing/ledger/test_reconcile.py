"""Spans between marks of the engines' counters, and the receipts that belong to them."""

from __future__ import annotations

from pathlib import Path

import msgspec

from gateway.billing.ledger.engine_counters import CounterSample, intervals
from gateway.billing.ledger.reconcile import compare, drift_ratio, totals_by_deployment
from gateway.billing.ledger.rows import UnbilledWork
from gateway.core.ids import new_event_id
from tests.gateway.billing.ledger.receipts import a_correction, a_receipt, write_chain


def mark(hour: int, input_tokens: int, output_tokens: int, deployment: str = "a") -> CounterSample:
    return CounterSample(f"2026-11-20T{hour:02}:00:00.000000Z", deployment, "m", input_tokens, output_tokens)


MARKS = [mark(9, 1000, 100), mark(9, 5, 5, "b"), mark(10, 1100, 110), mark(11, 30, 8), mark(12, 90, 10)]


def test_a_span_is_what_was_counted_between_two_marks() -> None:
    found = [
        (interval.since[11:13], interval.until[11:13], interval.input, interval.output, interval.restarted)
        for interval in intervals(MARKS)
    ]
    assert found == [("09", "10", 100, 10, False), ("10", "11", 30, 8, True), ("11", "12", 60, 2, False)]
    assert [interval.since[11:13] for interval in intervals(MARKS, since="2026-11-20T10")] == ["10", "11"]
    assert [interval.since[11:13] for interval in intervals(MARKS, until="2026-11-20T11:00:00.000000Z")] == ["09", "10"]


def test_what_is_in_no_answer_was_not_done_for_anybody() -> None:
    one = msgspec.structs.replace
    first, second = one(mark(9, 10, 100), unwanted=40), one(mark(10, 20, 130), unwanted=45)
    assert [(interval.output, interval.restarted) for interval in intervals([first, second])] == [(25, False)]
    late = one(mark(10, 20, 100), unwanted=43)  # it had computed them by the first mark, and not yet heard of that
    assert [(interval.output, interval.restarted) for interval in intervals([first, late])] == [(-3, False)]
    anew = one(mark(10, 20, 130), unwanted=1)
    assert [(interval.output, interval.restarted) for interval in intervals([first, anew])] == [(129, True)]


def test_what_two_gateways_note_on_the_hour_is_one_mark() -> None:
    a_moment_later = {one: one.at.replace("00.000000Z", "00.012345Z") for one in MARKS}
    others = [msgspec.structs.replace(one, at=at, input=one.input + 1) for one, at in a_moment_later.items()]
    both = sorted([*MARKS, *others], key=lambda one: one.at)
    found = [(interval.since[11:13], interval.until[11:13], interval.input) for interval in intervals(both)]
    assert found == [("09", "10", 100), ("10", "11", 31), ("11", "12", 60)]


def test_a_receipt_belongs_to_the_span_in_which_its_call_ended(tmp_path: Path) -> None:
    counts = {"input_uncached": 10, "cache_read": 80, "cache_write": 5, "output": 9, "reasoning": 0}
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
    compared = compare(tmp_path, intervals(MARKS))
    assert [(one.input, one.output) for one in compared] == [(95, 10), (95, 9), (0, 0)]
    assert [(one.unbilled_input, one.unbilled_output) for one in compared] == [(0, 0), (0, 0), (95, 9)]
    assert [(one.input_drift, one.output_drift) for one in compared] == [(5, 0), (-65, -1), (-35, -7)]
    (whole,) = totals_by_deployment(compared)
    assert (whole.interval.input, whole.input, whole.unbilled_input, whole.input_drift) == (190, 190, 95, -95)
    assert (whole.unbilled_output, whole.output_drift) == (9, -8)
    assert whole.interval.restarted


def test_the_share_of_a_drift() -> None:
    assert (drift_ratio(-1, 1000), drift_ratio(0, 0), drift_ratio(-5, 0)) == (0.001, 0.0, 1.0)
    assert compare(Path("nowhere"), []) == []
