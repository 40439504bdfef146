"""The breaker as a state machine over times that are told to it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gateway.deployments.circuit_breaker import (
    FAILURES_TO_OPEN,
    OPEN_SHARE,
    PAUSE_FIRST_SECONDS,
    PAUSE_MAX_SECONDS,
    REST_MAX_SECONDS,
    SLOW_START_SECONDS,
    SLOW_START_SHARE,
    WINDOW,
    CircuitBreaker,
)


def opened(now: float = 0.0) -> CircuitBreaker:
    breaker = CircuitBreaker()
    for _ in range(FAILURES_TO_OPEN):
        breaker.failed(now)
    return breaker


def test_one_failure_lets_others_go_first_and_does_not_close_the_door() -> None:
    breaker = CircuitBreaker()
    breaker.failed(10.0)
    assert breaker.admit(10.0) and not breaker.open
    assert breaker.is_deprioritised(10.0) and not breaker.is_deprioritised(10.0 + PAUSE_FIRST_SECONDS)
    breaker.succeeded(10.1)
    assert not breaker.is_deprioritised(10.1)


def test_failures_in_a_row_open_it() -> None:
    breaker = opened(now=0.0)
    assert breaker.open and not breaker.admit(0.1)
    assert breaker.is_deprioritised(0.1)


def test_half_of_the_last_calls_failing_opens_it() -> None:
    breaker = CircuitBreaker()
    for call in range(WINDOW):
        assert not breaker.open
        breaker.failed(0.0) if call % round(1 / OPEN_SHARE) else breaker.succeeded(0.0)
    assert breaker.open


def test_half_open_lets_one_call_through_at_a_time() -> None:
    breaker = opened()
    now = breaker.next_try_at
    assert breaker.would_admit(now) and breaker.admit(now)
    assert not breaker.admit(now) and not breaker.would_admit(now)
    breaker.abandoned()  # its client left: nothing is known
    assert breaker.admit(now)
    breaker.succeeded(now)
    assert not breaker.open and breaker.admit(now) and breaker.admit(now)


def test_each_failed_probe_doubles_the_pause_up_to_a_bound() -> None:
    breaker, pauses = opened(), []
    for _ in range(12):
        now = breaker.next_try_at
        assert breaker.admit(now)
        breaker.failed(now)
        pauses.append(breaker.next_try_at - now)
    assert pauses[1] == 2 * pauses[0] and pauses[-1] == PAUSE_MAX_SECONDS


def test_a_server_that_names_a_pause_gets_it_within_a_bound() -> None:
    breaker = CircuitBreaker()
    breaker.rest(0.0, 5.0)
    assert not breaker.open and not breaker.admit(4.9) and breaker.admit(5.0)
    breaker.rest(10.0, 1e9)
    assert breaker.admit(10.0 + REST_MAX_SECONDS)


def test_after_it_was_open_it_gets_its_places_back_slowly() -> None:
    breaker = opened()
    assert breaker.slot_share(0.0) == 1.0 and not breaker.in_slow_start
    now = breaker.next_try_at
    breaker.admit(now)
    breaker.succeeded(now)
    assert breaker.in_slow_start
    assert breaker.slot_share(now) == SLOW_START_SHARE
    assert SLOW_START_SHARE < breaker.slot_share(now + SLOW_START_SECONDS / 2) < 1.0
    assert breaker.slot_share(now + SLOW_START_SECONDS) == 1.0 and not breaker.in_slow_start


def test_its_state_is_told_in_one_word() -> None:
    breaker = CircuitBreaker()
    assert breaker.state(0.0) == "closed"
    breaker.failed(0.0)
    assert breaker.state(0.1) == "resting" and breaker.state(9.0) == "closed"
    breaker = opened()
    assert breaker.state(breaker.next_try_at - 0.1) == "open"
    now = breaker.next_try_at
    assert breaker.state(now) == "half_open" and breaker.admit(now) and breaker.state(now) == "half_open"
    breaker.succeeded(now)
    assert breaker.state(now) == "closed"


def test_a_health_check_shortens_the_pause() -> None:
    breaker = opened()
    breaker.allow_probe(0.1)
    assert breaker.open and breaker.admit(0.1)


def test_a_health_check_does_not_shorten_the_pause_that_a_server_asked_for() -> None:
    breaker = opened()
    breaker.rest(0.0, 60.0)
    breaker.allow_probe(0.1)
    breaker.succeeded(0.2)  # a call that was under way
    assert not breaker.would_admit(59.0) and breaker.admit(60.0)


def test_a_slow_one_is_ejected_for_a_while() -> None:
    breaker = CircuitBreaker()
    breaker.eject(0.0, 30.0)
    assert not breaker.admit(29.0) and breaker.admit(30.0)


def begun_and_broken(breaker: CircuitBreaker, now: float) -> None:
    assert breaker.admit(now)
    breaker.succeeded(now)
    breaker.answer_broken(now)


def test_answers_that_break_off_in_a_row_open_it_however_well_they_begin() -> None:
    breaker = CircuitBreaker()
    for _ in range(FAILURES_TO_OPEN):
        assert not breaker.open
        begun_and_broken(breaker, 0.0)
    assert breaker.open


def test_answers_that_come_whole_between_broken_ones_keep_it_closed() -> None:
    breaker = CircuitBreaker()
    for call in range(2 * WINDOW):
        breaker.succeeded(0.0)
        breaker.completed() if call % 4 else breaker.answer_broken(0.0)
    assert not breaker.open


def test_half_of_the_last_answers_breaking_off_opens_it() -> None:
    breaker = CircuitBreaker()
    for call in range(WINDOW):
        assert not breaker.open
        breaker.succeeded(0.0)
        breaker.answer_broken(0.0) if call % round(1 / OPEN_SHARE) else breaker.completed()
    assert breaker.open


def test_only_a_whole_answer_makes_it_trusted_again() -> None:
    breaker = opened()
    pauses = []
    for _ in range(4):
        now = breaker.next_try_at
        begun_and_broken(breaker, now)
        assert breaker.open
        pauses.append(breaker.next_try_at - now)
    assert pauses == [2 * PAUSE_FIRST_SECONDS * 2**n for n in range(4)]
    now = breaker.next_try_at
    assert breaker.admit(now)
    breaker.succeeded(now)
    breaker.completed()
    begun_and_broken(breaker, now)
    assert not breaker.open


def test_a_health_check_does_not_bring_back_what_breaks_its_answers_off() -> None:
    breaker = CircuitBreaker()
    for _ in range(FAILURES_TO_OPEN):
        begun_and_broken(breaker, 0.0)
    breaker.allow_probe(0.1)
    assert not breaker.would_admit(PAUSE_FIRST_SECONDS / 2) and breaker.would_admit(PAUSE_FIRST_SECONDS)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["ok", "whole", "broken", "failed", "abandoned", "rest", "wait"]), st.floats(0.0, 20.0)
        )
    )
)
def test_it_is_never_closed_for_ever(steps: list[tuple[str, float]]) -> None:
    breaker, now = CircuitBreaker(), 0.0
    for what, seconds in steps:
        now += seconds
        if what == "wait" or not breaker.admit(now):
            continue
        if what in ("ok", "whole", "broken"):
            breaker.succeeded(now)
            if what == "whole":
                breaker.completed()
            elif what == "broken":
                breaker.answer_broken(now)
        elif what == "failed":
            breaker.failed(now)
        elif what == "rest":
            breaker.rest(now, seconds)
        else:
            breaker.abandoned()
    assert breaker.would_admit(now + max(REST_MAX_SECONDS, PAUSE_MAX_SECONDS))
