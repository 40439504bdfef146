"""The order of queued calls, in virtual time: what classes and tenants are promised, for all kinds of traffic."""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.errors import GatewayError, Overloaded
from gateway.deployments.fleet import Fleet
from gateway.deployments.slot_permit import SlotPermit
from gateway.policy import LatencyClass, Model, Policy
from gateway.prefix.working_set import WorkingSet
from gateway.providers.offline import OfflineProvider
from gateway.queueing.scheduler import HELD_SECONDS_MAX, QueueScheduler
from tests.gateway.calls import a_policy


@dataclass(frozen=True)
class QueuedCall:
    """A call with only the fields that the queue reads."""

    tenant_name: str
    class_name: str
    latency_class: LatencyClass
    model: Model
    tokens_estimate: int
    fingerprint: Sequence[int] = ()
    prompt_tokens_estimate: int = 0
    session: str | None = None

    @property
    def may_be_held(self) -> bool:
        return self.latency_class.is_background

    @property
    def tenant_path(self) -> tuple[str, ...]:
        return tuple(self.tenant_name.split("/"))


@dataclass(eq=False)
class FakeWaiter:
    call: QueuedCall
    due: float
    permit: SlotPermit | None = None
    error: GatewayError | None = None
    done: bool = False
    on_grant: Callable[[FakeWaiter], None] = lambda waiter: None

    def grant(self, permit: SlotPermit) -> None:
        self.permit = permit
        self.on_grant(self)

    def reject(self, error: GatewayError) -> None:
        self.error = error


@dataclass
class Pool:
    """A scheduler for deployment `a` of model `m`, with a few slots, and `b` of `n`, with one. All slots are taken."""

    slots: int = 1
    waiting_max: int = 10_000
    classes: dict[str, dict[str, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.policy: Policy = a_policy(
            deployments=[
                {"name": "a", "base_url": "http://a.invalid/v1", "model": "s", "max_concurrency": self.slots},
                {"name": "b", "base_url": "http://b.invalid/v1", "model": "s", "max_concurrency": 1},
            ],
            models=[{"name": "m", "deployments": ["a"]}, {"name": "n", "deployments": ["b"]}],
            classes=self.classes,
        )
        self.fleet = Fleet(lambda deployment: OfflineProvider())
        self.fleet.apply(self.policy)
        self.scheduler: QueueScheduler[FakeWaiter] = QueueScheduler(self.fleet, waiting_max=self.waiting_max)
        self.taken = [permit for model in self.policy.models for permit in self.take(model)]
        self.granted: list[FakeWaiter] = []

    def take(self, model: Model) -> list[SlotPermit]:
        slots = []
        while (permit := self.fleet.take(self.fleet.deployments_of(model), 0.0, background=True)) is not None:
            slots.append(permit)
        return slots

    def call(
        self,
        tenant: str = "t",
        class_name: str = "realtime",
        tokens: int = 100,
        chain: Sequence[int] = (),
        model: int = 0,
    ) -> QueuedCall:
        limits = self.policy.classes[class_name]
        return QueuedCall(tenant, class_name, limits, self.policy.models[model], tokens, chain, tokens)

    def join(self, call: QueuedCall, now: float = 0.0, due: float | None = None) -> FakeWaiter:
        waiter = FakeWaiter(call, now + call.latency_class.max_wait if due is None else due)
        waiter.on_grant = self.granted.append
        self.scheduler.add(waiter, now)
        return waiter

    def next(self, now: float = 0.0) -> FakeWaiter | None:
        """Release a slot of model `m` and return the waiter that gets it. Its call ends at the next `next`."""
        before = len(self.granted)
        self.taken[0].release()
        self.scheduler.grant_free_slots(now)
        if len(self.granted) > before:
            permit = self.granted[-1].permit
            assert permit is not None
            self.taken[0] = permit
            return self.granted[-1]
        self.taken[0] = self.take(self.policy.models[0])[0]
        return None

    def drain(self) -> list[FakeWaiter]:
        drained = []
        while (waiter := self.next()) is not None:
            drained.append(waiter)
        return drained


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


TENANTS = ("t", "u", "v")
arrivals = st.lists(
    st.tuples(
        st.sampled_from(TENANTS),
        st.sampled_from(["realtime", "batch"]),
        st.integers(1, 2000),  # tokens, of which a slot computes 1000 per second
        st.floats(0, 0.5),  # seconds after the one before
        st.one_of(st.none(), st.floats(0.1, 20.0)),  # seconds after which it times out
    ),
    max_size=120,
)


@given(arrivals, st.integers(1, 3), st.sampled_from([0.0, 0.1, 0.3]))
def test_the_promises_hold_for_random_traffic(
    plan: list[tuple[str, str, int, float, float | None]], slots: int, share: float
) -> None:
    """No call is forgotten or served twice, and no slot is idle while a call is queued. Tenants of a class that are
    queued at the same time get equal shares, except for one call of each. Batch gets its share."""
    pool = Pool(slots, classes={"batch": {"hold": False, "min_share": share}})
    for permit in pool.taken[:slots]:
        permit.release()
    Traffic(pool, share).run(plan)
    assert not any(deployment.slots_taken for deployment in pool.fleet.deployments_of(pool.policy.models[0]))
    assert pool.scheduler.waiting == 0 == pool.scheduler.depth("batch") + pool.scheduler.depth("realtime")


class Traffic:
    """A heap of future events. Checks the promises at every turn."""

    def __init__(self, pool: Pool, share: float) -> None:
        self.pool, self.share = pool, share
        self.events: list[tuple[float, int, Callable[[float], None]]] = []
        self.event_numbers = count()
        self.queued: set[FakeWaiter] = set()
        self.ended: set[FakeWaiter] = set()
        self.largest_call = 1
        self.served_while_both_queued: dict[tuple[str, ...], Counter[str]] = defaultdict(Counter)  # tokens
        self.served_while_batch_queued: Counter[str] = Counter()

    def run(self, plan: list[tuple[str, str, int, float, float | None]]) -> None:
        now = 0.0
        for tenant, class_name, tokens, after, patience in plan:
            now += after
            self.at(now, partial(self.arrive, self.pool.call(tenant, class_name, tokens), patience))
        while self.events:
            now, _, happen = heapq.heappop(self.events)
            happen(now)
            idle = any(deployment.has_slot for deployment in self.pool.fleet.deployments_of(self.pool.policy.models[0]))
            assert not (idle and self.queued)
        assert len(self.ended) == len(plan)

    def at(self, when: float, happen: Callable[[float], None]) -> None:
        heapq.heappush(self.events, (when, next(self.event_numbers), happen))

    def arrive(self, call: QueuedCall, patience: float | None, now: float) -> None:
        waiter = FakeWaiter(call, now + (3600.0 if patience is None else patience))
        self.largest_call = max(self.largest_call, call.tokens_estimate)
        permit = self.pool.scheduler.take_now(call, now)
        if permit is not None:
            waiter.permit = permit
            self.at(now + call.tokens_estimate / 1000, lambda at: self.end(waiter, at))
            return
        waiter.on_grant = lambda waiter: self.on_turn(waiter, now=self.clock)
        self.queued.add(waiter)
        self.pool.scheduler.add(waiter, now)
        if patience is not None:
            self.at(waiter.due, lambda at: self.give_up(waiter))

    def give_up(self, waiter: FakeWaiter) -> None:
        if waiter in self.queued:
            self.queued.remove(waiter)
            self.ended.add(waiter)
            self.pool.scheduler.remove(waiter)
            self.forget()

    def end(self, waiter: FakeWaiter, now: float) -> None:
        assert waiter not in self.ended and waiter.permit is not None
        self.ended.add(waiter)
        waiter.permit.release()
        self.clock = now
        self.pool.scheduler.grant_free_slots(now)

    def on_turn(self, waiter: FakeWaiter, now: float) -> None:
        call, tokens = waiter.call, waiter.call.tokens_estimate
        assert waiter in self.queued, "it is granted a slot twice"
        self.at(now + tokens / 1000, lambda at: self.end(waiter, at))
        present = {(w.call.class_name, w.call.tenant_name) for w in self.queued}
        first = min(
            w.due for w in self.queued if (w.call.class_name, w.call.tenant_name) == (call.class_name, call.tenant_name)
        )
        assert waiter.due == first, "the earliest timeout goes first within a tenant"
        for one in TENANTS:
            for other in TENANTS:
                pair = (call.class_name, one, other)
                if one < other and {(call.class_name, one), (call.class_name, other)} <= present:
                    had = self.served_while_both_queued[pair]
                    had[call.tenant_name] += tokens
                    assert abs(had[one] - had[other]) <= 2 * self.largest_call
        if any(class_name == "batch" for class_name, _ in present):
            self.served_while_batch_queued["all"] += tokens
            self.served_while_batch_queued["batch"] += tokens if call.class_name == "batch" else 0
            assert (
                self.served_while_batch_queued["batch"]
                >= self.share * self.served_while_batch_queued["all"] - 2 * self.largest_call
            )
        self.queued.remove(waiter)
        self.forget()

    def forget(self) -> None:
        """Forget the counts of tenants and classes that are not queued any more: promises hold without gaps only."""
        present = set(map(_class_and_tenant, self.queued))
        for class_name, one, other in list(self.served_while_both_queued):
            if not {(class_name, one), (class_name, other)} <= present:
                del self.served_while_both_queued[class_name, one, other]
        if not any(class_name == "batch" for class_name, _ in present):
            self.served_while_batch_queued.clear()


def _class_and_tenant(waiter: FakeWaiter) -> tuple[str, str]:
    return waiter.call.class_name, waiter.call.tenant_name
