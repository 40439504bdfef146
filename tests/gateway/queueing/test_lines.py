"""Whose turn it is, in virtual time: what is promised to classes and tenants, for traffic of every kind."""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.errors import GatewayError, Overloaded
from gateway.deployments.fleet import Fleet, SlotPermit
from gateway.policy import LatencyClass, Model, Policy
from gateway.prefix.working_set import WorkingSet
from gateway.providers.base import OfflineProvider
from gateway.queueing.lines import Lines
from tests.gateway.calls import a_policy


@dataclass(frozen=True)
class Asked:
    """What the lines have to know of a call."""

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
        return self.latency_class.hold


@dataclass(eq=False)
class Waiting:
    call: Asked
    due: float
    place: SlotPermit | None = None
    error: GatewayError | None = None
    gone: bool = False
    on_grant: Callable[[Waiting], None] = lambda waiting: None

    def grant(self, place: SlotPermit) -> None:
        self.place = place
        self.on_grant(self)

    def refuse(self, error: GatewayError) -> None:
        self.error = error


@dataclass
class Pool:
    """Lines before a server with a few places, all of them taken by calls that end when they are told to."""

    places: int = 1
    waiting_max: int = 10_000
    classes: dict[str, dict[str, object]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.policy: Policy = a_policy(
            deployments=[
                {"name": "a", "base_url": "http://a.invalid/v1", "model": "s", "max_concurrency": self.places},
                {"name": "b", "base_url": "http://b.invalid/v1", "model": "s", "max_concurrency": 1},
            ],
            models=[{"name": "m", "deployments": ["a"]}, {"name": "n", "deployments": ["b"]}],
            classes=self.classes,
        )
        self.fleet = Fleet(lambda deployment: OfflineProvider())
        self.fleet.apply(self.policy)
        self.lines: Lines[Waiting] = Lines(self.fleet, waiting_max=self.waiting_max)
        self.taken = [place for model in self.policy.models for place in self.take(model)]
        self.granted: list[Waiting] = []

    def take(self, model: Model) -> list[SlotPermit]:
        places = []
        while (place := self.fleet.take(self.fleet.deployments_of(model), 0.0, background=True)) is not None:
            places.append(place)
        return places

    def call(
        self,
        tenant: str = "t",
        class_name: str = "realtime",
        tokens: int = 100,
        chain: Sequence[int] = (),
        model: int = 0,
    ) -> Asked:
        limits = self.policy.classes[class_name]
        return Asked(tenant, class_name, limits, self.policy.models[model], tokens, chain, tokens)

    def join(self, call: Asked, now: float = 0.0, due: float | None = None) -> Waiting:
        waiting = Waiting(call, now + call.latency_class.max_wait if due is None else due)
        waiting.on_grant = self.granted.append
        self.lines.join(waiting, now)
        return waiting

    def next(self, now: float = 0.0) -> Waiting | None:
        """Whose turn it is when the place at `m` comes free; who has it is done at once."""
        before = len(self.granted)
        self.taken[0].release()
        self.lines.serve(now)
        if len(self.granted) > before:
            place = self.granted[-1].place
            assert place is not None
            self.taken[0] = place
            return self.granted[-1]
        self.taken[0] = self.take(self.policy.models[0])[0]
        return None

    def drain(self) -> list[Waiting]:
        drained = []
        while (waiting := self.next()) is not None:
            drained.append(waiting)
        return drained


BATCH = {"batch": {"hold": False}}  # as far as order and shares go; what holds is tested in `test_queue`


def test_one_call_does_not_wait_behind_another_tenants_thousand() -> None:
    pool = Pool()
    for _ in range(200):
        pool.join(pool.call("many"))
    pool.next()
    alone = pool.join(pool.call("one"))
    assert alone in (pool.next(), pool.next())


def test_tenants_take_turns_by_tokens_and_not_by_calls() -> None:
    pool = Pool()
    for _ in range(100):
        pool.join(pool.call("long", tokens=1000))
        pool.join(pool.call("short", tokens=100))
    served: Counter[str] = Counter()
    for _ in range(55):
        waiting = pool.next()
        assert waiting is not None
        served[waiting.call.tenant_name] += waiting.call.tokens_estimate
    assert abs(served["long"] - served["short"]) <= 1100


def test_whoever_was_silent_has_saved_nothing_up() -> None:
    pool = Pool()
    for _ in range(30):
        pool.join(pool.call("early"))
    for _ in range(15):
        pool.next()
    for _ in range(15):
        pool.join(pool.call("late"))
    tenants = [waiting.call.tenant_name for waiting in pool.drain()]
    assert Counter(tenants[:10]) == {"early": 5, "late": 5}


def test_who_comes_back_at_once_is_still_ahead_by_what_it_had() -> None:
    """A tenant that always has one call waiting gets no more than one that has a hundred."""
    pool = Pool()
    for _ in range(100):
        pool.join(pool.call("steady"))
    pool.join(pool.call("one by one", tokens=300))
    tenants = Counter[str]()
    for _ in range(40):
        waiting = pool.next()
        assert waiting is not None
        tenants[waiting.call.tenant_name] += 1
        if waiting.call.tenant_name == "one by one":
            pool.join(pool.call("one by one", tokens=300))
    assert tenants["one by one"] == pytest.approx(10, abs=1)


def test_of_one_tenant_whoever_has_least_time_goes_first() -> None:
    pool = Pool()
    patient, hasty, newest = (pool.join(pool.call(), due=due) for due in (30.0, 5.0, 30.0))
    assert pool.drain() == [hasty, patient, newest]


def test_batch_goes_depth_first_inside_a_tenant_and_tenants_take_turns() -> None:
    pool = Pool()
    for chain in ((1, 1), (2, 1), (1, 2), (2, 2)):
        pool.join(pool.call("t", "batch", chain=tuple([chain[0]] * 16 + [chain[1]])))
        pool.join(pool.call("u", "batch", chain=tuple([10 + chain[0]] * 16 + [chain[1]])))
    order = [(w.call.tenant_name, w.call.fingerprint[0], w.call.fingerprint[-1]) for w in pool.drain()]
    assert order == [
        (tenant, group + (10 if tenant == "u" else 0), last) for group in (1, 2) for last in (1, 2) for tenant in "tu"
    ]


def test_one_too_many_of_a_class_displaces_a_call_of_the_tenant_that_has_most() -> None:
    pool = Pool(classes={"realtime": {"max_queue": 4}})
    of_many = [pool.join(pool.call("many"), now=float(n)) for n in range(4)]
    alone = pool.join(pool.call("one"), now=9.0)
    assert [waiting.error is None for waiting in of_many] == [True, True, True, False]
    error = of_many[3].error
    assert isinstance(error, Overloaded) and error.status == 503 and int(error.headers["retry-after"]) >= 1
    assert alone.error is None and len(list(pool.lines)) == 4
    again = pool.join(pool.call("many"), now=10.0)
    assert again.error is not None, "who has most gives way itself"
    assert pool.lines.depth("realtime") == pool.lines.waiting == 4


def test_batch_is_shed_first() -> None:
    pool = Pool(waiting_max=3, classes=BATCH)
    batch = [pool.join(pool.call("t", "batch"), now=float(n)) for n in range(2)]
    other = pool.join(pool.call("t", "batch", model=1))
    urgent = [pool.join(pool.call("u")) for _ in range(3)]
    assert [w.error is not None for w in (*batch, other)] == [True, True, True]
    assert [w.error for w in urgent] == [None, None, None]
    assert pool.join(pool.call("t", "batch")).error is not None, "there is nobody less urgent than itself"
    assert pool.lines.waiting == 3 and pool.lines.gave_way == {"batch": 4}


def test_who_is_refused_is_told_when_those_that_wait_will_have_had_their_turns() -> None:
    pool = Pool(classes={"realtime": {"max_queue": 20, "max_wait": "9s"}})

    def told(now: float) -> str:
        error = pool.join(pool.call(), now=now).error
        assert error is not None
        return error.headers["retry-after-ms"]

    for _ in range(20):
        pool.join(pool.call())
    assert told(0.0) == "9000"  # nobody has had a turn yet: no longer than the class waits
    for number in range(10):
        pool.next(now=number * 0.25)
        pool.join(pool.call(), now=number * 0.25)
    assert told(2.5) == "5250"  # 21 of them, four a second
    assert told(60.0) == "9000"
    pool.lines.serve(60.0)
    for _ in range(40):
        pool.next(now=60.0)
        pool.join(pool.call(), now=60.0)
    assert told(60.0) == "1000"


def test_without_a_minimum_share_batch_gets_what_is_left() -> None:
    pool = Pool(classes=BATCH)
    pool.join(pool.call(class_name="batch"))
    for _ in range(20):
        pool.join(pool.call())
    assert [w.call.class_name for w in pool.drain()] == ["realtime"] * 20 + ["batch"]


def test_a_minimum_share_is_of_tokens() -> None:
    pool = Pool(classes={"batch": {"hold": False, "min_share": "20%"}})
    for _ in range(100):
        pool.join(pool.call(class_name="batch", tokens=1000))
        pool.join(pool.call(tokens=100))
    served: Counter[str] = Counter()
    for _ in range(80):
        waiting = pool.next()
        assert waiting is not None
        served[waiting.call.class_name] += waiting.call.tokens_estimate
    assert served["batch"] / served.total() == pytest.approx(0.2, abs=0.1)


def test_a_share_is_also_of_what_others_get_without_waiting() -> None:
    """There are places, left for real-time calls by how many there lately were; batch is owed some all the same."""
    pool = Pool(places=4, classes={"batch": {"min_share": "25%"}})
    for place in pool.taken[:4]:
        place.release()
    busiest = [pool.lines.at_once(pool.call(), 0.0) for _ in range(4)]
    for each in busiest[1:]:
        assert each is not None
        each.release()
    waiting = [pool.join(pool.call(class_name="batch")) for _ in range(5)]
    pool.lines.serve(0.0)
    assert pool.lines.depth("batch") == 5, "they wait although there is room"
    for number in range(1, 16):
        place = pool.lines.at_once(pool.call(), 0.0)
        assert place is not None
        place.release()
        pool.lines.serve(0.0)
        for batch in waiting:
            if batch.place is not None:
                batch.place.release()
        had = 5 - pool.lines.depth("batch")
        assert had >= 0.25 * (number + had) - 1, f"{had} of {number + had}"
    assert 4 <= had <= 5


def test_a_share_is_of_the_models_own_servers() -> None:
    pool = Pool(classes={"batch": {"hold": False, "min_share": "50%"}})
    pool.join(pool.call(class_name="batch", model=1))
    for _ in range(10):
        pool.join(pool.call())
    assert [w.call.model.name for w in pool.drain()] == ["m"] * 10


def test_a_held_call_keeps_neither_other_tenants_nor_other_classes_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = Pool(classes={"batch": {"min_share": "50%"}})

    def admits(working_set: WorkingSet, prompt: Asked, *_: object, **__: object) -> bool:
        return prompt.tenant_name != "held"

    monkeypatch.setattr(WorkingSet, "admit", admits)
    for _ in range(10):
        pool.join(pool.call("held", "batch", chain=(1,)))
    free = pool.join(pool.call("free", "batch", chain=(2,)))
    urgent = pool.join(pool.call())
    assert pool.drain() == [urgent, free]
    assert pool.lines.someone_is_held and pool.lines.depth("batch") == 10


TENANTS = ("t", "u", "v")
arrivals = st.lists(
    st.tuples(
        st.sampled_from(TENANTS),
        st.sampled_from(["realtime", "batch"]),
        st.integers(1, 2000),  # tokens, of which a place computes 1000 in a second
        st.floats(0, 0.5),  # seconds after the one before
        st.one_of(st.none(), st.floats(0.1, 20.0)),  # seconds after which it stops waiting
    ),
    max_size=120,
)


@given(arrivals, st.integers(1, 3), st.sampled_from([0.0, 0.1, 0.3]))
def test_whatever_comes(plan: list[tuple[str, str, int, float, float | None]], places: int, share: float) -> None:
    """Nobody is forgotten or served twice, no place is idle while somebody waits, tenants of a class that wait at the
    same time get the same, but for a call of each, and batch has its share."""
    pool = Pool(places, classes={"batch": {"hold": False, "min_share": share}})
    for place in pool.taken[:places]:
        place.release()
    Traffic(pool, share).run(plan)
    assert not any(server.slots_taken for server in pool.fleet.deployments_of(pool.policy.models[0]))
    assert pool.lines.waiting == 0 == pool.lines.depth("batch") + pool.lines.depth("realtime")


class Traffic:
    """A heap of what happens next, and the promises, looked at whenever somebody has had a turn."""

    def __init__(self, pool: Pool, share: float) -> None:
        self.pool, self.share = pool, share
        self.events: list[tuple[float, int, Callable[[float], None]]] = []
        self.numbers = count()
        self.waiting: set[Waiting] = set()
        self.ended: set[Waiting] = set()
        self.largest = 1
        self.since_both: dict[tuple[str, ...], Counter[str]] = defaultdict(Counter)  # tokens, while two wait
        self.since_batch: Counter[str] = Counter()

    def run(self, plan: list[tuple[str, str, int, float, float | None]]) -> None:
        now = 0.0
        for tenant, class_name, tokens, after, patience in plan:
            now += after
            self.at(now, partial(self.come, self.pool.call(tenant, class_name, tokens), patience))
        while self.events:
            now, _, happen = heapq.heappop(self.events)
            happen(now)
            idle = any(server.has_slot for server in self.pool.fleet.deployments_of(self.pool.policy.models[0]))
            assert not (idle and self.waiting)
        assert len(self.ended) == len(plan)

    def at(self, when: float, happen: Callable[[float], None]) -> None:
        heapq.heappush(self.events, (when, next(self.numbers), happen))

    def come(self, call: Asked, patience: float | None, now: float) -> None:
        waiting = Waiting(call, now + (3600.0 if patience is None else patience))
        self.largest = max(self.largest, call.tokens_estimate)
        place = self.pool.lines.at_once(call, now)
        if place is not None:
            waiting.place = place
            self.at(now + call.tokens_estimate / 1000, lambda at: self.end(waiting, at))
            return
        waiting.on_grant = lambda waiting: self.turn(waiting, now=self.clock)
        self.waiting.add(waiting)
        self.pool.lines.join(waiting, now)
        if patience is not None:
            self.at(waiting.due, lambda at: self.give_up(waiting))

    def give_up(self, waiting: Waiting) -> None:
        if waiting in self.waiting:
            self.waiting.remove(waiting)
            self.ended.add(waiting)
            self.pool.lines.leave(waiting)
            self.forget()

    def end(self, waiting: Waiting, now: float) -> None:
        assert waiting not in self.ended and waiting.place is not None
        self.ended.add(waiting)
        waiting.place.release()
        self.clock = now
        self.pool.lines.serve(now)

    def turn(self, waiting: Waiting, now: float) -> None:
        call, tokens = waiting.call, waiting.call.tokens_estimate
        assert waiting in self.waiting, "it has had its turn"
        self.at(now + tokens / 1000, lambda at: self.end(waiting, at))
        present = {(w.call.class_name, w.call.tenant_name) for w in self.waiting}
        first = min(
            w.due
            for w in self.waiting
            if (w.call.class_name, w.call.tenant_name) == (call.class_name, call.tenant_name)
        )
        assert waiting.due == first, "of one tenant, who has least time goes first"
        for one in TENANTS:
            for other in TENANTS:
                pair = (call.class_name, one, other)
                if one < other and {(call.class_name, one), (call.class_name, other)} <= present:
                    had = self.since_both[pair]
                    had[call.tenant_name] += tokens
                    assert abs(had[one] - had[other]) <= 2 * self.largest
        if any(class_name == "batch" for class_name, _ in present):
            self.since_batch["all"] += tokens
            self.since_batch["batch"] += tokens if call.class_name == "batch" else 0
            assert self.since_batch["batch"] >= self.share * self.since_batch["all"] - 2 * self.largest
        self.waiting.remove(waiting)
        self.forget()

    def forget(self) -> None:
        """Promises hold as long as somebody waits all the time."""
        present = set(map(_line_and_tenant, self.waiting))
        for class_name, one, other in list(self.since_both):
            if not {(class_name, one), (class_name, other)} <= present:
                del self.since_both[class_name, one, other]
        if not any(class_name == "batch" for class_name, _ in present):
            self.since_batch.clear()


def _line_and_tenant(waiting: Waiting) -> tuple[str, str]:
    return waiting.call.class_name, waiting.call.tenant_name
