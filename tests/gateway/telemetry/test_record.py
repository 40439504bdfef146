import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.telemetry import names
from gateway.telemetry import record as record_module
from gateway.telemetry.record import CallRecord, Phase, phases, times
from gateway.types import Attempt
from tests.gateway.telemetry.conftest import at, timings


def attempt(started: int, ended: int) -> Attempt:
    return Attempt("a", "ok", at(started), at(ended), span_id=1)


def outline(found: list[Phase]) -> list[tuple[str, int, int, bool]]:
    return [(p.name, (p.start_ns - at(0)) // 1000, (p.end_ns - at(0)) // 1000, p.within_chat) for p in found]


def assert_covers(found: list[Phase], started: int, ended: int) -> None:
    own = [phase for phase in found if not phase.within_chat]
    assert own[0].start_ns == at(started)
    assert own[-1].end_ns == at(ended)
    assert all(left.end_ns == right.start_ns for left, right in itertools.pairwise(own))


def test_chat_begins_with_the_first_attempt_and_ends_with_settle(record: CallRecord) -> None:
    found = phases(record.timings, record.attempts)
    assert outline(found) == [
        ("authenticate", 0, 20, False),
        ("canonicalise", 20, 60, False),
        ("cache.lookup", 60, 80, False),
        ("admit", 80, 100, False),
        ("queue", 100, 1100, False),
        ("route", 1100, 1200, False),
        ("chat", 1200, 50_000, False),
        ("settle", 50_000, 50_400, False),
    ]
    assert_covers(found, 0, 50_400)


def test_without_attempts_the_answer_is_a_replay() -> None:
    noted = timings(("authenticate", 1), ("cache.lookup", 10), ("chat", 20), ("settle", 30), ended=40)
    found = phases(noted, ())
    assert [phase.name for phase in found] == ["authenticate", "cache.lookup", "replay", "settle"]
    assert_covers(found, 0, 40)


def test_the_queue_of_a_fallback_model_lies_within_the_chat() -> None:
    noted = timings(("queue", 1), ("route", 10), ("queue", 30), ("route", 40), ("chat", 60), ("settle", 80), ended=90)
    found = phases(noted, (attempt(12, 28), attempt(45, 80)))
    assert outline(found) == [
        ("queue", 0, 10, False),
        ("route", 10, 12, False),
        ("chat", 12, 80, False),
        ("queue", 30, 40, True),
        ("route", 40, 60, True),
        ("settle", 80, 90, False),
    ]
    assert_covers(found, 0, 90)


def test_a_follower_whose_leader_failed_makes_its_own_attempt() -> None:
    noted = timings(
        ("cache.lookup", 1), ("chat", 5), ("settle", 20), ("admit", 25), ("route", 30), ("chat", 60), ("settle", 80),
        ended=90,
    )  # fmt: skip
    found = phases(noted, (attempt(33, 80),))
    assert outline(found) == [
        ("cache.lookup", 0, 5, False),
        ("replay", 5, 20, False),
        ("settle", 20, 25, False),
        ("admit", 25, 30, False),
        ("route", 30, 33, False),
        ("chat", 33, 80, False),
        ("settle", 80, 90, False),
    ]


@pytest.mark.parametrize(
    ("names", "ended"),
    [
        ([("authenticate", 3)], 9),
        ([("authenticate", 3), ("settle", 9)], 9),
        ([("route", 3), ("settle", 20)], 30),  # every attempt failed; the relay did not begin
        ([("route", 3), ("chat", 20)], 30),  # settle did not begin
        ([("route", 25), ("chat", 15), ("settle", 40)], 30),  # the clock was set back
        ([("chat", 3), ("settle", 8), ("route", 8), ("chat", 8), ("settle", 8)], 8),
        ([("route", 50), ("settle", 60)], 70),  # attempts began before the route, by the clock
    ],
)
@pytest.mark.parametrize("tries", [(), (attempt(8, 25),), (attempt(8, 12), attempt(10, 200))])
def test_phases_cover_the_request(names: list[tuple[str, int]], ended: int, tries: tuple[Attempt, ...]) -> None:
    found = phases(timings(*names, ended=ended), tries)
    assert_covers(found, 0, max(ended, *(us for _, us in names)))
    assert all(phase.end_ns >= phase.start_ns for phase in found)


def test_without_timings_there_are_no_phases() -> None:
    assert phases(timings(ended=5), ()) == []


def test_predicted_cached_tokens_of_the_answering_deployment(record: CallRecord) -> None:
    assert record.predicted_cached_tokens == 64
    record.deployment = None
    assert record.predicted_cached_tokens == 0


PHASE_NAMES = ("authenticate", "admit", "queue", "route", "chat")


@given(st.lists(st.integers(-1, 2), min_size=9, max_size=9), st.integers(-3, 20))
def test_usual_phases_are_the_same_as_by_the_rule_for_all(steps: list[int], opened: int) -> None:
    names_in_order = ("authenticate", "canonicalise", "cache.lookup", "admit", "queue", "route", "chat", "settle")
    starts = list(itertools.accumulate(steps))
    noted = timings(*zip(names_in_order, starts, strict=False), ended=starts[-1])
    tries = [attempt(opened, opened + 1)]
    found = phases(noted, tries)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(record_module, "_usual_phases", lambda timings, attempts: None)
        assert found == phases(noted, tries)
    assert all(type(phase) is Phase for phase in found)


def test_a_usual_request_takes_the_fast_path() -> None:
    names_in_order = ("authenticate", "canonicalise", "cache.lookup", "admit", "queue", "route", "chat", "settle")
    noted = timings(*zip(names_in_order, (1, 2, 3, 4, 5, 6, 8, 9), strict=True), ended=10)
    assert record_module._usual_phases(noted, [attempt(7, 9)]) is not None


@given(st.lists(st.integers(1, 9), min_size=9, max_size=9), st.integers(0, 1))
def test_times_of_the_fast_path_are_the_sums_over_the_phases(steps: list[int], asked: int) -> None:
    names_in_order = ("authenticate", "canonicalise", "cache.lookup", "admit", "queue", "route", "chat", "settle")
    starts = list(itertools.accumulate(steps))
    noted = timings(*zip(names_in_order, starts, strict=False), ended=starts[-1])
    opened = starts[5 + asked]
    found, summed = phases(noted, [attempt(opened, opened + 1)]), times(noted, [attempt(opened, opened + 1)])
    own = [p for p in found if p.name not in ("queue", "chat") and not p.within_chat]
    assert summed.own == sum(p.end_ns - p.start_ns for p in own)
    assert summed.queued == 1000 * (starts[5] - starts[4])
    assert (summed.whole, summed.chat) == (1000 * starts[-1], 1000 * (starts[7] - opened))


@given(
    st.lists(st.tuples(st.sampled_from(PHASE_NAMES), st.integers(0, 50)), min_size=1, max_size=8),
    st.lists(st.integers(0, 300), max_size=2),
    st.integers(0, 20),
)
def test_times_are_the_sums_over_the_phases(entered: list[tuple[str, int]], attempted: list[int], rest: int) -> None:
    starts = list(itertools.accumulate((seconds for _, seconds in entered), initial=0))
    settled = max(starts[-1], *attempted, 0) + 1
    noted = timings(
        *((name, start) for (name, _), start in zip(entered, starts, strict=False)),
        ("settle", settled),
        ended=settled + rest,
    )
    attempts = [attempt(started, started + 1) for started in attempted]
    found = phases(noted, attempts)
    summed = times(noted, attempts)
    not_own = {"queue", "chat", names.REPLAY_SPAN}
    assert summed.whole == found[-1].end_ns - noted.started_ns
    assert summed.own == sum(p.end_ns - p.start_ns for p in found if p.name not in not_own and not p.within_chat)
    queues = [p.end_ns - p.start_ns for p in found if p.name == "queue"]
    assert summed.queued == (sum(queues) if queues else None)
    chats = [p.end_ns - p.start_ns for p in found if p.name == "chat"]
    assert summed.chat == (chats[0] if chats else None)
