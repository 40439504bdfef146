"""The promises of the queue's order, for random traffic in virtual time."""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Callable
from functools import partial
from itertools import count

from hypothesis import given
from hypothesis import strategies as st

from tests.gateway.queueing.pool import FakeWaiter, Pool, QueuedCall

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
