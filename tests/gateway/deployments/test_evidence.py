"""The rules by which failures speak against a deployment or a request, in virtual time."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gateway.deployments.circuit_breaker import PAUSE_FIRST_SECONDS, CircuitBreaker
from gateway.deployments.evidence import (
    DISTINCT_TO_CONVICT,
    EJECTION_FIRST_SECONDS,
    EJECTION_MAX_SECONDS,
    ENTRIES_MAX,
    QUARANTINE_FIRST_SECONDS,
    RECORD_SECONDS,
    RECORDS_MAX,
    SAME_CRASH_SECONDS,
    STANDING_SECONDS,
    UPDATES_MAX,
    Ejections,
    Evidence,
    Quarantine,
    Verdict,
    fingerprint_of,
)
from tests.gateway.calls import a_call, chat

HERE, THERE = 1, 2  # deployments
LATER = SAME_CRASH_SECONDS  # when a crash is another one


def test_an_error_speaks_against_the_request_if_others_succeed_meanwhile() -> None:
    evidence = Evidence()
    evidence.succeeded(1.0)
    assert evidence.judge_error(7, sent_at=0.9, now=1.1) is Verdict.REQUEST


def test_an_error_after_the_last_success_is_open_and_its_repetition_is_not() -> None:
    evidence = Evidence()
    evidence.succeeded(0.0)
    assert evidence.judge_error(7, sent_at=1.0, now=1.1) is Verdict.OPEN
    assert evidence.judge_error(7, sent_at=1.2, now=1.3) is Verdict.REQUEST
    assert evidence.judge_error(8, sent_at=1.2, now=1.3) is Verdict.OPEN


def test_one_request_never_convicts_a_deployment() -> None:
    evidence = Evidence()
    assert {evidence.judge_error(7, now, now) for now in range(100)} == {Verdict.OPEN}


def test_distinct_requests_convict_a_deployment_at_which_none_succeeds() -> None:
    evidence = Evidence()
    verdicts = [evidence.judge_error(request, 0.0, 0.1) for request in range(DISTINCT_TO_CONVICT)]
    assert verdicts == [Verdict.OPEN] * (DISTINCT_TO_CONVICT - 1) + [Verdict.DEPLOYMENT]


def test_distinct_requests_do_not_convict_a_deployment_soon_after_a_success() -> None:
    evidence = Evidence()
    evidence.succeeded(0.0)
    for request in range(10 * DISTINCT_TO_CONVICT):
        assert evidence.judge_error(request, 1.0, STANDING_SECONDS - 1.0) is Verdict.OPEN
    assert evidence.judge_error(-1, 1.0, STANDING_SECONDS) is Verdict.DEPLOYMENT


def test_only_completed_responses_acquit_a_deployment_whose_stream_broke() -> None:
    evidence = Evidence()
    evidence.succeeded(1.0)
    assert not evidence.acquits_of_break(7, began_at=0.5, now=1.1, reported=True)
    evidence.completed(1.2)
    assert evidence.acquits_of_break(8, began_at=0.5, now=1.3, reported=True)
    assert not evidence.acquits_of_break(9, began_at=0.5, now=1.3, reported=False)
    assert evidence.acquits_of_break(9, began_at=1.4, now=1.5, reported=False), "twice, while others complete"


def test_the_evidence_is_bounded() -> None:
    evidence = Evidence()
    evidence.succeeded(0.0)
    for request in range(2 * ENTRIES_MAX):
        evidence.judge_error(request, 1.0, 1.0)
    assert len(evidence._failed) == len(evidence._unexplained) == ENTRIES_MAX


@given(st.lists(st.tuples(st.sampled_from(["good", "bad"]), st.integers(0, 30), st.floats(0.0, 3.0)), max_size=200))
def test_no_mix_of_requests_convicts_a_deployment_that_answers_the_innocent_ones(
    requests: list[tuple[str, int, float]],
) -> None:
    """The bound: not within STANDING_SECONDS of an answer, and later for the shortest pause only."""
    evidence, breaker, now, last_answer = Evidence(), CircuitBreaker(), 0.0, float("-inf")
    for kind, request, pause in requests:
        sent_at, now = now, now + pause
        if not breaker.would_admit(sent_at):
            assert breaker.next_try_at - sent_at <= PAUSE_FIRST_SECONDS
            continue
        breaker.admit(sent_at)
        if kind == "good":
            last_answer = now
            breaker.succeeded(now)
            evidence.completed(now)
            continue
        was_open = breaker.open
        verdict = evidence.judge_error(request, sent_at, now)
        if verdict is Verdict.REQUEST:
            breaker.abandoned()
        elif verdict is Verdict.DEPLOYMENT:
            breaker.convicted_by_many(now)
        else:
            breaker.suspected(now)
        if breaker.open and not was_open:
            assert now - last_answer >= STANDING_SECONDS


@given(st.lists(st.integers(0, 40), min_size=DISTINCT_TO_CONVICT, max_size=100, unique=True), st.floats(0.1, 5.0))
def test_a_deployment_that_fails_all_requests_is_convicted(requests: list[int], interval: float) -> None:
    evidence = Evidence()
    evidence.succeeded(0.0)
    now, verdicts = 0.0, []
    for request in requests:
        sent_at, now = now + interval / 2, now + interval
        verdicts.append(evidence.judge_error(request, sent_at, now))
    enough = int(STANDING_SECONDS / interval) + 1 + DISTINCT_TO_CONVICT
    assert (Verdict.DEPLOYMENT in verdicts) or len(requests) < enough
    assert Verdict.REQUEST not in verdicts


def test_an_ejection_doubles_up_to_a_bound_and_starts_anew_after_an_answer() -> None:
    ejections = Ejections()
    seconds = [ejections.eject("status 401") for _ in range(8)]
    assert seconds[:2] == [EJECTION_FIRST_SECONDS, 2 * EJECTION_FIRST_SECONDS] and seconds[-1] == EJECTION_MAX_SECONDS
    ejections.end()
    assert not ejections.reason and ejections.eject("status 401") == EJECTION_FIRST_SECONDS


def test_a_fingerprint_is_the_same_for_all_tenants_and_differs_by_content() -> None:
    one = fingerprint_of(a_call(chat("crash", user="a"), tenant="t"))
    assert one == fingerprint_of(a_call(chat("crash", user="b"), tenant="u"))
    assert one != fingerprint_of(a_call(chat("crash", temperature=0.5)))
    assert one != fingerprint_of(a_call(chat("crush")))


# Crashes.


def test_a_request_is_blocked_at_its_second_crash_for_a_bounded_time() -> None:
    quarantine = Quarantine()
    quarantine.crashed(7, HERE, 0.0)
    assert not quarantine.is_blocked(7, 0.0)
    quarantine.crashed(7, THERE, 1.0)
    assert quarantine.is_blocked(7, 1.0) and not quarantine.is_blocked(8, 1.0)
    assert not quarantine.is_blocked(7, 1.0 + QUARANTINE_FIRST_SECONDS)
    quarantine.crashed(7, THERE, 100.0)
    assert quarantine.is_blocked(7, 100.0 + QUARANTINE_FIRST_SECONDS), "a third crash blocks it for longer"


def test_lost_connections_of_one_crash_count_once() -> None:
    quarantine = Quarantine()
    quarantine.crashed(7, HERE, 0.0)
    quarantine.crashed(7, HERE, SAME_CRASH_SECONDS / 2)
    assert not quarantine.is_blocked(7, SAME_CRASH_SECONDS / 2)


def test_a_success_ends_the_quarantine_and_speaks_against_the_neighbours() -> None:
    quarantine = Quarantine()
    for now in (0.0, LATER):
        for request in (7, 8):
            quarantine.crashed(request, HERE, now)
    assert not quarantine.is_blocked(7, LATER) and not quarantine.is_blocked(8, LATER)
    quarantine.succeeded(8)
    assert quarantine.is_blocked(7, LATER) and not quarantine.is_blocked(8, LATER)
    quarantine.succeeded(7)
    assert not quarantine.is_blocked(7, LATER) and not quarantine


def test_a_third_crash_blocks_a_request_in_any_case() -> None:
    quarantine = Quarantine()
    for crash in range(3):
        quarantine.crashed(7, HERE, crash * LATER)
        quarantine.crashed(100 + crash, HERE, crash * LATER)  # another one each time, which never succeeds
        assert quarantine.is_blocked(7, crash * LATER) == (crash == 2)


def test_crashes_are_forgotten() -> None:
    quarantine = Quarantine()
    quarantine.crashed(7, HERE, 0.0)
    quarantine.crashed(7, HERE, RECORD_SECONDS)
    assert not quarantine.is_blocked(7, RECORD_SECONDS)


def test_a_crash_that_two_gateways_report_counts_once() -> None:
    one, other = Quarantine(), Quarantine()
    for quarantine in (one, other):
        quarantine.crashed(7, HERE, 0.0)
    for update in one.take_updates():
        other.receive(*update, 0.1)
    assert not other.is_blocked(7, 0.1)
    other.crashed(7, THERE, 0.2)
    for update in other.take_updates():
        one.receive(*update, 0.3)
    assert one.is_blocked(7, 0.3) and other.is_blocked(7, 0.3)
    assert one.take_updates() == (), "updates from peers are not forwarded"


def test_a_success_is_shared_with_peers() -> None:
    one, other = Quarantine(), Quarantine()
    one.crashed(7, HERE, 0.0)
    for update in one.take_updates():
        other.receive(*update, 0.1)
    other.succeeded(7)
    other.succeeded(8)  # it has no crashes
    updates = other.take_updates()
    assert updates == ((7, 0),) and not other
    one.receive(*updates[0], 0.2)
    one.crashed(7, THERE, 0.3)
    assert not one.is_blocked(7, 0.3)


def test_the_quarantine_is_bounded() -> None:
    quarantine = Quarantine()
    for request in range(2 * RECORDS_MAX):
        quarantine.crashed(request, HERE, 0.0)
    assert len(quarantine) == RECORDS_MAX and len(quarantine.take_updates()) == UPDATES_MAX


def test_a_deployment_that_refused_connections_before_was_shutting_down() -> None:
    evidence = Evidence()
    assert not evidence.was_shutting_down(90.0, 100.0)
    evidence.refused_connection(100.0)
    evidence.refused_connection(104.0)
    assert evidence.was_shutting_down(90.0, 104.5)
    assert not evidence.was_shutting_down(101.0, 104.5), "it accepted this request afterwards"
    assert not evidence.was_shutting_down(90.0, 100.1), "perhaps the connection was refused because of the crash"
    evidence.succeeded(105.0)
    assert not evidence.was_shutting_down(90.0, 106.0)
    evidence.refused_connection(107.0)
    evidence.accepted_connection()
    assert not evidence.was_shutting_down(90.0, 109.0)


@given(
    st.lists(
        st.tuples(st.sampled_from([HERE, THERE]), st.sets(st.integers(0, 9), max_size=6), st.booleans()), max_size=30
    )
)
def test_no_mix_of_crashes_convicts_an_innocent_request_beyond_the_bound(
    crashes: list[tuple[int, set[int], bool]],
) -> None:
    """Requests 0 to 2 are guilty: a deployment crashes if one of them is in flight. The others succeed afterwards if
    they are tried again. The bound: an innocent request is blocked only after three crashes without a success.
    """
    quarantine, now, unfinished = Quarantine(), 0.0, dict.fromkeys(range(10), 0)
    for deployment, in_flight, retried in crashes:
        now += LATER
        sent = {request for request in in_flight if not quarantine.is_blocked(request, now)}
        if not any(request < 3 for request in sent):
            continue
        for request in sent:
            quarantine.crashed(request, deployment, now)
            unfinished[request] += 1
        for request in sent if retried else ():
            if request >= 3:
                quarantine.succeeded(request)
                unfinished[request] = 0
        for request in range(3, 10):
            assert not quarantine.is_blocked(request, now) or unfinished[request] >= 3
