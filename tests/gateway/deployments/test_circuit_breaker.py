"""The circuit breaker as a state machine, in virtual time."""

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


def open_breaker(now: float = 0.0) -> CircuitBreaker:
    breaker = CircuitBreaker()
    for _ in range(FAILURES_TO_OPEN):
        breaker.failed(now)
    return breaker


def test_one_failure_deprioritises_and_does_not_open() -> None:
    breaker = CircuitBreaker()
    breaker.failed(10.0)
    assert breaker.admit(10.0) and not breaker.open
    assert breaker.is_deprioritised(10.0) and not breaker.is_deprioritised(10.0 + PAUSE_FIRST_SECONDS)
    breaker.succeeded(10.1)
    assert not breaker.is_deprioritised(10.1)


def test_failures_in_a_row_open_the_breaker() -> None:
    breaker = open_breaker(now=0.0)
    assert breaker.open and not breaker.admit(0.1)
    assert breaker.is_deprioritised(0.1)


def test_half_of_the_newest_calls_failing_opens_the_breaker() -> None:
    breaker = CircuitBreaker()
    for call in range(WINDOW):
        assert not breaker.open
        breaker.failed(0.0) if call % round(1 / OPEN_SHARE) else breaker.succeeded(0.0)
    assert breaker.open


def test_half_open_admits_one_probe_at_a_time() -> None:
    breaker = open_breaker()
    now = breaker.next_try_at
    assert breaker.would_admit(now) and breaker.admit(now)
    assert not breaker.admit(now) and not breaker.would_admit(now)
    breaker.abandoned()  # its client disconnected: nothing was learned
    assert breaker.admit(now)
    breaker.succeeded(now)
    assert not breaker.open and breaker.admit(now) and breaker.admit(now)


def test_each_failed_probe_doubles_the_pause_up_to_a_bound() -> None:
    breaker, pauses = open_breaker(), []
    for _ in range(12):
        now = breaker.next_try_at
        assert breaker.admit(now)
        breaker.failed(now)
        pauses.append(breaker.next_try_at - now)
    assert pauses[1] == 2 * pauses[0] and pauses[-1] == PAUSE_MAX_SECONDS


def test_retry_after_is_respected_within_a_bound() -> None:
    breaker = CircuitBreaker()
    breaker.rest(0.0, 5.0)
    assert not breaker.open and not breaker.admit(4.9) and breaker.admit(5.0)
    breaker.rest(10.0, 1e9)
    assert breaker.admit(10.0 + REST_MAX_SECONDS)


def test_slots_return_slowly_after_an_opening() -> None:
    breaker = open_breaker()
    assert (breaker.slot_share(0.0), breaker.recovered_at) == (1.0, None)
    now = breaker.next_try_at
    breaker.admit(now)
    breaker.succeeded(now)
    assert breaker.recovered_at is not None
    assert breaker.slot_share(now) == SLOW_START_SHARE
    assert SLOW_START_SHARE < breaker.slot_share(now + SLOW_START_SECONDS / 2) < 1.0
    assert breaker.slot_share(now + SLOW_START_SECONDS) == 1.0 and breaker.recovered_at is None


def test_state_names() -> None:
    breaker = CircuitBreaker()
    assert breaker.state(0.0) == "closed"
    breaker.failed(0.0)
    assert breaker.state(0.1) == "resting" and breaker.state(9.0) == "closed"
    breaker = open_breaker()
    assert breaker.state(breaker.next_try_at - 0.1) == "open"
    now = breaker.next_try_at
    assert breaker.state(now) == "half_open" and breaker.admit(now) and breaker.state(now) == "half_open"
    breaker.succeeded(now)
    assert breaker.state(now) == "closed"


def test_a_health_check_shortens_the_pause() -> None:
    breaker = open_breaker()
    breaker.allow_probe(0.1)
    assert breaker.open and breaker.admit(0.1)


def test_a_health_check_does_not_shorten_retry_after() -> None:
    breaker = open_breaker()
    breaker.rest(0.0, 60.0)
    breaker.allow_probe(0.1)
    breaker.succeeded(0.2)  # a call that was in flight
    assert not breaker.would_admit(59.0) and breaker.admit(60.0)


def test_an_ejected_deployment_gets_no_requests_for_a_while() -> None:
    breaker = CircuitBreaker()
    breaker.eject(0.0, 30.0)
    assert not breaker.admit(29.0) and breaker.admit(30.0)


def begin_and_break(breaker: CircuitBreaker, now: float) -> None:
    assert breaker.admit(now)
    breaker.succeeded(now)
    breaker.answer_broken(now)


def test_cut_responses_in_a_row_open_the_breaker() -> None:
    breaker = CircuitBreaker()
    for _ in range(FAILURES_TO_OPEN):
        assert not breaker.open
        begin_and_break(breaker, 0.0)
    assert breaker.open


def test_complete_responses_between_cut_ones_keep_it_closed() -> None:
    breaker = CircuitBreaker()
    for call in range(2 * WINDOW):
        breaker.succeeded(0.0)
        breaker.completed() if call % 4 else breaker.answer_broken(0.0)
    assert not breaker.open


def test_half_of_the_newest_responses_being_cut_opens_it() -> None:
    breaker = CircuitBreaker()
    for call in range(WINDOW):
        assert not breaker.open
        breaker.succeeded(0.0)
        breaker.answer_broken(0.0) if call % round(1 / OPEN_SHARE) else breaker.completed()
    assert breaker.open


def test_only_a_complete_response_resets_the_pause() -> None:
    breaker = open_breaker()
    pauses = []
    for _ in range(4):
        now = breaker.next_try_at
        begin_and_break(breaker, now)
        assert breaker.open
        pauses.append(breaker.next_try_at - now)
    assert pauses == [2 * PAUSE_FIRST_SECONDS * 2**n for n in range(4)]
    now = breaker.next_try_at
    assert breaker.admit(now)
    breaker.succeeded(now)
    breaker.completed()
    begin_and_break(breaker, now)
    assert not breaker.open


def test_a_health_check_does_not_shorten_the_pause_after_cut_responses() -> None:
    breaker = CircuitBreaker()
    for _ in range(FAILURES_TO_OPEN):
        begin_and_break(breaker, 0.0)
    breaker.allow_probe(0.1)
    assert not breaker.would_admit(PAUSE_FIRST_SECONDS / 2) and breaker.would_admit(PAUSE_FIRST_SECONDS)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["ok", "whole", "broken", "failed", "abandoned", "rest", "wait"]), st.floats(0.0, 20.0)
        )
    )
)
def test_the_breaker_never_stays_open_for_ever(steps: list[tuple[str, float]]) -> None:
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
