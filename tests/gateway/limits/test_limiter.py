"""What becomes of reservations when clients leave, calls are long, and the store is away."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Any

import pytest
from msgspec import structs

from gateway.core.errors import LimitReached, StorageUnavailable
from gateway.limits import LIMITS
from gateway.limits import limiter as phase
from gateway.limits.budget import Budget
from gateway.limits.limiter import EXTEND_SECONDS, LEASE_SECONDS, UNLIMITED, Limiter
from gateway.limits.scope import Scope, scopes_of_call
from gateway.policy import Limits
from gateway.storage.base import Charge, Grant, Rejection
from gateway.storage.memory import MemoryStorage
from gateway.types import Call, Usage
from tests.gateway.calls import a_call, a_policy

NOW = 1_795_132_800.0


class Store(MemoryStorage):
    """Counts what is asked of it. While `away`, it does nothing; while `slow`, it acts, and answers when let go."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[str] = []
        self.away = False
        self.slow = False
        self.reached = asyncio.Event()
        self.let_go = asyncio.Event()

    async def _meet(self, what: str) -> None:
        self.asked.append(what)
        if self.away:
            raise StorageUnavailable("away")

    async def _answer(self) -> None:
        self.reached.set()
        if self.slow:
            await self.let_go.wait()

    async def reserve(
        self, reservation_id: str, charges: Sequence[Charge], *, lease_seconds: float, now: float
    ) -> Grant | Rejection:
        await self._meet("reserve")
        verdict = await super().reserve(reservation_id, charges, lease_seconds=lease_seconds, now=now)
        await self._answer()
        return verdict

    async def settle(self, reservation_id: str, actual: Sequence[int], *, now: float) -> bool:
        await self._meet("settle")
        ended = await super().settle(reservation_id, actual, now=now)
        await self._answer()
        return ended

    async def extend_lease(self, reservation_id: str, *, lease_seconds: float, now: float) -> bool:
        await self._meet("extend_lease")
        return await super().extend_lease(reservation_id, lease_seconds=lease_seconds, now=now)


class Components:
    """A limiter, its store, and a clock that the test moves."""

    def __init__(self) -> None:
        self.now = NOW
        self.store = Store()
        self.limiter = Limiter(self.store, LIMITS, clock=lambda: self.now)

    def call(self, **limits: Any) -> Call:
        return a_call(policy=a_policy(tenants=[{"name": "t", "limits": limits or {"concurrency": 1}}]))

    async def is_free(self) -> bool:
        """Whether the one place can be had; gives it back."""
        try:
            reservation = await self.limiter.admit(self.call())
        except LimitReached:
            return False
        await reservation.release()
        return True


@pytest.fixture
def components() -> Components:
    return Components()


async def test_a_tenant_without_limits_costs_no_storage_call(components: Components) -> None:
    reservation = await components.limiter.admit(a_call())
    assert reservation is UNLIMITED
    assert reservation.headers == {}
    await reservation.settle(Usage(output=5), 5)
    await reservation.release()
    assert components.store.asked == []


async def test_one_storage_call_to_begin_and_one_to_end(components: Components) -> None:
    limits = {"requests": "9/1m", "tokens": "9M/1m", "concurrency": 9, "budget": {"amount": 9}}
    reservation = await components.limiter.admit(components.call(**limits))
    assert components.limiter.open_reservations == 1
    await reservation.settle(Usage(output=5), 5)
    assert components.store.asked == ["reserve", "settle"]
    assert components.limiter.open_reservations == 0


async def test_ended_once(components: Components) -> None:
    reservation = await components.limiter.admit(components.call(budget={"amount": "0.000000010"}))
    await asyncio.gather(*(reservation.settle(Usage(), 4) for _ in range(5)), reservation.release())
    assert components.store.asked == ["reserve", "settle"]
    await (await components.limiter.admit(components.call(budget={"amount": "0.000000010"}))).settle(Usage(), 5)
    await components.limiter.admit(components.call(budget={"amount": "0.000000010"}))  # nine of ten are spent


async def test_what_a_killed_gateway_s_call_cost_is_charged_although_its_model_is_gone(components: Components) -> None:
    call = components.call(budget={"amount": "0.000000010"})
    gone = structs.replace(call, id="lost", model=call.model.model_copy(update={"name": "gone"}))
    await components.limiter.charge_orphaned(gone, Usage(output=5), 8, admitted=NOW)
    (budget,) = [Budget.of(scope_limits, scope) for scope, scope_limits in _scopes(call)]
    assert budget is not None
    assert await components.store.remaining([budget.charge_for(0, NOW)], now=NOW) == (2,)


def _scopes(call: Call) -> Iterable[tuple[Scope, Limits]]:
    principal = call.principal
    return scopes_of_call(principal.tenant, principal.key_id, principal.limits, call.model, call.class_name)


async def test_an_outage_of_the_store_stands_in_the_log_once_with_its_end(
    components: Components, caplog: pytest.LogCaptureFixture
) -> None:
    components.store.away = True
    for _ in range(3):
        with pytest.raises(StorageUnavailable):
            await components.limiter.admit(components.call())
    components.store.away = False
    for _ in range(2):
        await (await components.limiter.admit(components.call())).release()
    assert [record.getMessage() for record in caplog.records] == [
        "calls that have limits are refused: away",
        "the storage answers again: calls that have limits are taken",
    ]


async def test_a_store_that_is_away_refuses_and_is_counted(components: Components) -> None:
    components.store.away = True
    with pytest.raises(StorageUnavailable):
        await components.limiter.admit(components.call())
    assert components.limiter.store_failures == 1
    components.store.away = False
    await components.limiter.retry_unsettled()
    assert components.limiter.unsettled == 0
    assert await components.is_free()


async def test_settling_waits_for_a_store_that_is_away(components: Components) -> None:
    reservation = await components.limiter.admit(components.call())
    components.store.away = True
    await reservation.settle(Usage(), 0)  # does not raise
    await components.limiter.retry_unsettled()
    assert (components.limiter.unsettled, components.limiter.store_failures) == (1, 2)
    components.store.away = False
    assert not await components.is_free()
    await components.limiter.retry_unsettled()
    assert components.limiter.unsettled == 0
    assert await components.is_free()


async def test_what_waits_to_be_settled_is_bounded(components: Components, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(phase, "MAX_UNSETTLED", 3)
    reservations = [await components.limiter.admit(components.call(concurrency=9)) for _ in range(5)]
    components.store.away = True
    for reservation in reservations:
        await reservation.release()
    assert (components.limiter.unsettled, components.limiter.settlements_dropped) == (3, 2)
    components.store.away = False
    await components.limiter.retry_unsettled()
    components.now += LEASE_SECONDS  # the two that were dropped run out
    for _ in range(9):
        await components.limiter.admit(components.call(concurrency=9))


async def test_a_client_that_leaves_during_admission_holds_nothing(components: Components) -> None:
    components.store.slow = True
    admission = asyncio.create_task(components.limiter.admit(components.call()))
    await components.store.reached.wait()
    admission.cancel()
    with pytest.raises(asyncio.CancelledError):
        await admission
    components.store.slow = False
    assert not await components.is_free()
    await components.limiter.retry_unsettled()
    assert await components.is_free()


async def test_settling_survives_cancellation(components: Components) -> None:
    """The store has not answered: whether it was settled is unknown, so it is asked again, and settles once."""
    limits = {"budget": {"amount": "0.000000010"}}
    reservation = await components.limiter.admit(components.call(**limits))
    components.store.slow = True
    components.store.reached.clear()
    settling = asyncio.create_task(reservation.settle(Usage(), 4))
    await components.store.reached.wait()
    settling.cancel()
    with pytest.raises(asyncio.CancelledError):
        await settling
    components.store.slow = False
    await components.limiter.retry_unsettled()
    assert components.store.asked == ["reserve", "settle", "settle"]
    again = await components.limiter.admit(components.call(**limits))
    await again.settle(Usage(), 6)
    assert components.limiter.unsettled == 0


async def test_long_calls_keep_their_leases(components: Components) -> None:
    reservation = await components.limiter.admit(components.call())
    for _ in range(10):
        components.now += EXTEND_SECONDS
        await components.limiter.extend_due()
        assert not await components.is_free()
    assert components.store.asked.count("extend_lease") == 10
    await reservation.release()
    components.now += EXTEND_SECONDS
    await components.limiter.extend_due()
    assert components.store.asked.count("extend_lease") == 10


async def test_a_clock_that_is_set_back_extends_what_is_open(components: Components) -> None:
    reservation = await components.limiter.admit(components.call())
    components.now -= 5 * 3600
    await components.limiter.extend_due()
    assert components.store.asked.count("extend_lease") == 1
    await components.limiter.extend_due()
    assert components.store.asked.count("extend_lease") == 1
    components.now += EXTEND_SECONDS
    await components.limiter.extend_due()
    assert components.store.asked.count("extend_lease") == 2
    await reservation.release()
    assert await components.is_free()


async def test_what_a_call_cost_counts_although_the_clock_was_set_ahead_meanwhile(components: Components) -> None:
    call = components.call(budget={"amount": "0.01", "per": "total"}, requests="10/1m")
    reservation = await components.limiter.admit(call)
    components.now += 5 * 3600
    await components.limiter.extend_due()
    await reservation.settle(Usage(output=3), 7_000_000)
    await reservation.settle(Usage(output=3), 7_000_000)
    (account,) = (account for key, account in components.store._accounts.items() if "budget" in key)
    assert (account.spent, account.held) == (7_000_000, 0)


@pytest.mark.parametrize(("per", "period"), [("hour", "2025-12-31T23"), ("day", "2025-12-31"), ("month", "2025-12")])
async def test_a_call_over_a_border_is_charged_to_the_period_in_which_it_began(
    components: Components, per: str, period: str
) -> None:
    call = components.call(budget={"amount": "1", "per": per})
    components.now = datetime(2025, 12, 31, 23, 59, 50, tzinfo=UTC).timestamp()
    reservation = await components.limiter.admit(call)
    components.now += 20
    await components.limiter.extend_due()
    await reservation.settle(Usage(output=3), 7_000)
    later = await components.limiter.admit(structs.replace(call, id="later"))
    await later.settle(Usage(output=1), 5)
    accounts = {key.rpartition("/")[2]: account for key, account in components.store._accounts.items()}
    assert accounts[period].spent == 7_000
    assert sorted(account.spent for account in accounts.values()) == [5, 7_000]
    assert all(account.held == 0 for account in accounts.values())


async def test_short_calls_are_not_extended(components: Components) -> None:
    await components.limiter.admit(components.call())
    components.now += EXTEND_SECONDS - 0.1
    await components.limiter.extend_due()
    assert "extend_lease" not in components.store.asked


async def test_extending_is_tried_again_until_the_lease_is_over(components: Components) -> None:
    await components.limiter.admit(components.call())
    components.store.away = True
    components.now += EXTEND_SECONDS
    await components.limiter.extend_due()
    components.now += EXTEND_SECONDS
    components.store.away = False
    await components.limiter.extend_due()
    assert components.limiter.leases_lost == 0
    components.now += LEASE_SECONDS
    await components.limiter.extend_due()
    assert components.limiter.leases_lost == 1
    assert components.limiter.open_reservations == 0


async def test_the_keeper_does_both_by_itself(components: Components, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(phase, "RETRY_SECONDS", 0.001)
    long = await components.limiter.admit(components.call(concurrency=2))
    short = await components.limiter.admit(components.call(concurrency=2))
    components.store.away = True
    await short.release()
    components.store.away = False
    components.now += EXTEND_SECONDS
    await components.limiter.start()
    await components.limiter.start()
    async with asyncio.timeout(10):
        while components.limiter.unsettled or "extend_lease" not in components.store.asked:
            await asyncio.sleep(0)
    components.store.away = True
    await long.release()
    components.store.away = False
    await components.limiter.stop()  # settles what is left
    await components.limiter.stop()
    assert components.limiter.unsettled == 0


async def test_many_at_once_are_settled_in_bounded_portions(components: Components) -> None:
    reservations = [await components.limiter.admit(components.call(concurrency=1000)) for _ in range(300)]
    components.store.away = True
    for reservation in reservations:
        await reservation.release()
    before = len(components.store.asked)
    await components.limiter.retry_unsettled()
    assert len(components.store.asked) - before == phase.MAX_AT_ONCE  # away: no more is tried
    components.store.away = False
    await components.limiter.retry_unsettled()
    assert components.limiter.unsettled == 0


async def test_odd_tenant_names_stay_apart(components: Components) -> None:
    for name in ("a", "a/b", "a}", "{", "ä ö"):
        policy = a_policy(tenants=[{"name": name, "limits": {"concurrency": 1}}])
        await components.limiter.admit(a_call(policy=policy, tenant=name))
