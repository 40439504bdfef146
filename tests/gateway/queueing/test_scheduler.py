"""The order of queued calls, in virtual time: what classes and tenants are promised, for all kinds of traffic."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from gateway.core.errors import Overloaded
from gateway.prefix.working_set import WorkingSet
from gateway.queueing.scheduler import HELD_SECONDS_MAX
from tests.gateway.queueing.pool import Pool, QueuedCall

# For tests of order and shares; `test_queue` tests what holds calls.
BATCH: dict[str, dict[str, Any]] = {"batch": {"hold": False}}


def test_one_call_does_not_wait_behind_many_calls_of_another_tenant() -> None:
    pool = Pool()
    for _ in range(200):
        pool.join(pool.call("many"))
    pool.next()
    alone = pool.join(pool.call("one"))
    assert alone in (pool.next(), pool.next())


def test_tenants_share_turns_by_tokens_and_not_by_calls() -> None:
    pool = Pool()
    for _ in range(100):
        pool.join(pool.call("long", tokens=1000))
        pool.join(pool.call("short", tokens=100))
    served: Counter[str] = Counter()
    for _ in range(55):
        waiter = pool.next()
        assert waiter is not None
        served[waiter.call.tenant_name] += waiter.call.tokens_estimate
    assert abs(served["long"] - served["short"]) <= 1100


def test_a_tenant_without_queued_calls_saves_up_no_turns() -> None:
    pool = Pool()
    for _ in range(30):
        pool.join(pool.call("early"))
    for _ in range(15):
        pool.next()
    for _ in range(15):
        pool.join(pool.call("late"))
    tenants = [waiter.call.tenant_name for waiter in pool.drain()]
    assert Counter(tenants[:10]) == {"early": 5, "late": 5}


def test_an_organisation_with_many_teams_has_one_share_which_its_teams_divide() -> None:
    pool = Pool()
    for _ in range(10):
        for team in range(10):
            pool.join(pool.call(f"organisation/team {team}"))
        for project in ("a", "b"):
            pool.join(pool.call(f"other/{project}"))
        pool.join(pool.call("alone"))
        pool.join(pool.call("other"))
    tenants = [waiter.call.tenant_name for waiter in pool.drain()]
    outermost = Counter(tenant.partition("/")[0] for tenant in tenants[:30])
    assert outermost == {"organisation": 10, "other": 10, "alone": 10}
    within = Counter(tenants[:27])
    assert {within[f"organisation/team {team}"] for team in range(10)} == {0, 1}
    assert within["other"] == within["other/a"] == within["other/b"] == 3, "its own calls are like a child's"


def test_the_first_team_of_an_organisation_joins_its_own_calls() -> None:
    pool = Pool()
    own = [pool.join(pool.call("organisation", tokens=1000)) for _ in range(8)]
    assert [pool.next(), pool.next()] == own[:2]
    for _ in range(6):
        pool.join(pool.call("organisation/team", tokens=1000))
    own[2].done = True
    pool.scheduler.remove(own[2])
    tenants = [waiter.call.tenant_name for waiter in pool.drain()]
    assert tenants[0] == "organisation/team", "its own calls are one grant ahead"
    assert Counter(tenants[:10]) == {"organisation": 5, "organisation/team": 5}


def test_the_fullest_organisation_loses_a_call_of_its_fullest_team() -> None:
    pool = Pool(classes={"realtime": {"max_queue": 10}})
    alone = [pool.join(pool.call("alone")) for _ in range(4)]
    few = [pool.join(pool.call("organisation/few")) for _ in range(2)]
    many = [pool.join(pool.call("organisation/many")) for _ in range(4)]
    new = pool.join(pool.call("alone"))
    assert [each.error is None for each in (*alone, new)] == [True] * 5
    assert [each.error is None for each in (*few, *many)] == [True] * 5 + [False]


def test_a_tenant_that_leaves_and_returns_keeps_its_virtual_time() -> None:
    """A tenant that always has one call queued gets no more than one that has a hundred."""
    pool = Pool()
    for _ in range(100):
        pool.join(pool.call("steady"))
    pool.join(pool.call("one by one", tokens=300))
    tenants = Counter[str]()
    for _ in range(40):
        waiter = pool.next()
        assert waiter is not None
        tenants[waiter.call.tenant_name] += 1
        if waiter.call.tenant_name == "one by one":
            pool.join(pool.call("one by one", tokens=300))
    assert tenants["one by one"] == pytest.approx(10, abs=1)


def test_the_earliest_timeout_goes_first_within_a_tenant() -> None:
    pool = Pool()
    patient, hasty, newest = (pool.join(pool.call(), due=due) for due in (30.0, 5.0, 30.0))
    assert pool.drain() == [hasty, patient, newest]


def test_batch_goes_depth_first_within_a_tenant_and_tenants_alternate() -> None:
    pool = Pool()
    for chain in ((1, 1), (2, 1), (1, 2), (2, 2)):
        pool.join(pool.call("t", "batch", chain=tuple([chain[0]] * 16 + [chain[1]])))
        pool.join(pool.call("u", "batch", chain=tuple([10 + chain[0]] * 16 + [chain[1]])))
    order = [(w.call.tenant_name, w.call.fingerprint[0], w.call.fingerprint[-1]) for w in pool.drain()]
    assert order == [
        (tenant, group + (10 if tenant == "u" else 0), last) for group in (1, 2) for last in (1, 2) for tenant in "tu"
    ]


def test_the_router_knows_how_many_calls_of_a_model_wait() -> None:
    pool = Pool(classes=BATCH)
    waiters = [pool.join(pool.call(class_name=name)) for name in ("realtime", "realtime", "batch")]
    pool.join(pool.call(model=1))
    traffic = [pool.fleet.deployments_of(model)[0].estimate.traffic for model in pool.policy.models]
    assert [one.queued for one in traffic] == [{"m": 3}, {"n": 1}]
    pool.next()
    for _ in range(2):  # the second time, it is not queued any more
        pool.scheduler.remove(waiters[1])
    assert traffic[0].queued == {"m": 1}
    pool.drain()
    assert traffic[0].queued == {}


def test_a_full_queue_sheds_a_call_of_the_tenant_with_the_most() -> None:
    pool = Pool(classes={"realtime": {"max_queue": 4}})
    from_many = [pool.join(pool.call("many"), now=float(n)) for n in range(4)]
    alone = pool.join(pool.call("one"), now=9.0)
    assert [waiter.error is None for waiter in from_many] == [True, True, True, False]
    error = from_many[3].error
    assert isinstance(error, Overloaded) and error.status == 503 and int(error.headers["retry-after"]) >= 1
    assert alone.error is None and len(list(pool.scheduler)) == 4
    again = pool.join(pool.call("many"), now=10.0)
    assert again.error is not None, "the tenant with the most queued calls loses its own new call"
    assert pool.scheduler.depth("realtime") == pool.scheduler.waiting == 4


def test_batch_is_shed_first() -> None:
    pool = Pool(waiting_max=3, classes=BATCH)
    batch = [pool.join(pool.call("t", "batch"), now=float(n)) for n in range(2)]
    other = pool.join(pool.call("t", "batch", model=1))
    urgent = [pool.join(pool.call("u")) for _ in range(3)]
    assert [w.error is not None for w in (*batch, other)] == [True, True, True]
    assert [w.error for w in urgent] == [None, None, None]
    assert pool.join(pool.call("t", "batch")).error is not None, "no other call is less urgent"
    assert pool.scheduler.waiting == 3 and pool.scheduler.shed == {"batch": 4}


def test_retry_after_is_when_the_queued_calls_will_have_been_served() -> None:
    pool = Pool(classes={"realtime": {"max_queue": 20, "max_wait": "9s"}})

    def retry_after_ms(now: float) -> str:
        error = pool.join(pool.call(), now=now).error
        assert error is not None
        return error.headers["retry-after-ms"]

    for _ in range(20):
        pool.join(pool.call())
    assert retry_after_ms(0.0) == "9000"  # no turn yet, so the pace is unknown: the class's max_wait
    for number in range(10):
        pool.next(now=number * 0.25)
        pool.join(pool.call(), now=number * 0.25)
    assert retry_after_ms(2.5) == "5250"  # 21 calls, four turns per second
    assert retry_after_ms(60.0) == "9000"
    pool.scheduler.grant_free_slots(60.0)
    for _ in range(40):
        pool.next(now=60.0)
        pool.join(pool.call(), now=60.0)
    assert retry_after_ms(60.0) == "1000"


def test_without_a_minimum_share_batch_goes_last() -> None:
    pool = Pool(classes=BATCH)
    pool.join(pool.call(class_name="batch"))
    for _ in range(20):
        pool.join(pool.call())
    assert [w.call.class_name for w in pool.drain()] == ["realtime"] * 20 + ["batch"]


def test_a_minimum_share_counts_tokens() -> None:
    pool = Pool(classes={"batch": {"hold": False, "min_share": "20%"}})
    for _ in range(100):
        pool.join(pool.call(class_name="batch", tokens=1000))
        pool.join(pool.call(tokens=100))
    served: Counter[str] = Counter()
    for _ in range(80):
        waiter = pool.next()
        assert waiter is not None
        served[waiter.call.class_name] += waiter.call.tokens_estimate
    assert served["batch"] / served.total() == pytest.approx(0.2, abs=0.1)


def test_a_minimum_share_counts_calls_that_were_not_queued() -> None:
    """Slots are free, but reserved for real-time calls by their recent peak. Batch is owed its share all the same."""
    pool = Pool(slots=4, classes={"batch": {"min_share": "25%"}})
    for taken in pool.taken[:4]:
        taken.release()
    busiest = [pool.scheduler.take_now(pool.call(), 0.0) for _ in range(4)]
    for each in busiest[1:]:
        assert each is not None
        each.release()
    queued = [pool.join(pool.call(class_name="batch")) for _ in range(5)]
    pool.scheduler.grant_free_slots(0.0)
    assert pool.scheduler.depth("batch") == 5, "they are held although slots are free"
    for number in range(1, 16):
        permit = pool.scheduler.take_now(pool.call(), 0.0)
        assert permit is not None
        permit.release()
        pool.scheduler.grant_free_slots(0.0)
        for batch in queued:
            if batch.permit is not None:
                batch.permit.release()
        had = 5 - pool.scheduler.depth("batch")
        assert had >= 0.25 * (number + had) - 1, f"{had} of {number + had}"
    assert 4 <= had <= 5


def test_a_minimum_share_counts_one_models_calls_only() -> None:
    pool = Pool(classes={"batch": {"hold": False, "min_share": "50%"}})
    pool.join(pool.call(class_name="batch", model=1))
    for _ in range(10):
        pool.join(pool.call())
    assert [w.call.model.name for w in pool.drain()] == ["m"] * 10


def test_a_held_call_blocks_neither_other_tenants_nor_other_classes(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = Pool(classes={"batch": {"min_share": "50%"}})

    def admits(working_set: WorkingSet, prompt: QueuedCall, *_: object, **__: object) -> bool:
        return prompt.tenant_name != "held"

    monkeypatch.setattr(WorkingSet, "admit", admits)
    for _ in range(10):
        pool.join(pool.call("held", "batch", chain=(1,)))
    free = pool.join(pool.call("free", "batch", chain=(2,)))
    urgent = pool.join(pool.call())
    assert pool.drain() == [urgent, free]
    assert pool.scheduler.has_held_calls and pool.scheduler.depth("batch") == 10


def test_a_background_call_is_held_for_a_bounded_time(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = Pool()
    monkeypatch.setattr(WorkingSet, "admit", lambda *_, **__: False)
    first = pool.join(pool.call("t", "batch", chain=(1,)))
    second = pool.join(pool.call("t", "batch", chain=(2,)), now=10.0)
    assert pool.next(now=HELD_SECONDS_MAX - 1.0) is None
    assert pool.next(now=HELD_SECONDS_MAX + 1.0) is first
    assert pool.next(now=HELD_SECONDS_MAX + 2.0) is None
    assert pool.next(now=HELD_SECONDS_MAX + 11.0) is second
