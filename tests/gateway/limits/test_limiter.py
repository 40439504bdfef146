"""Reservations when clients disconnect, calls are long, the clock is set, and the store is unreachable."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Any

import pytest
from msgspec import structs

from gateway.core.errors import LimitReached, StorageUnavailable
from gateway.limits import LIMITS
from gateway.limits import limiter as limiter_module
from gateway.limits.budget import BudgetLimit
from gateway.limits.limiter import EXTEND_SECONDS, LEASE_SECONDS, UNLIMITED, Limiter
from gateway.limits.scope import Scope, scopes_of_call
from gateway.policy import Limits
from gateway.storage.base import Charge, Grant, Rejection
from gateway.storage.memory import MemoryStorage
from gateway.types import Call, Usage
from tests.gateway.calls import a_call, a_policy

NOW = 1_795_132_800.0


class Store(MemoryStorage):
    """Records its operations. While `unreachable`, they fail. While `slow`, they act, but answer only once allowed."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[str] = []
        self.unreachable = False
        self.slow = False
        self.operation_done = asyncio.Event()
        self.may_answer = asyncio.Event()

    async def _called(self, what: str) -> None:
        self.operations.append(what)
        if self.unreachable:
            raise StorageUnavailable("timed out")

    async def _answered(self) -> None:
        self.operation_done.set()
        if self.slow:
            await self.may_answer.wait()

    async def reserve(
        self, reservation_id: str, charges: Sequence[Charge], *, lease_seconds: float, now: float
    ) -> Grant | Rejection:
        await self._called("reserve")
        verdict = await super().reserve(reservation_id, charges, lease_seconds=lease_seconds, now=now)
        await self._answered()
        return verdict

    async def settle(self, reservation_id: str, actual: Sequence[int], *, now: float) -> bool:
        await self._called("settle")
        ended = await super().settle(reservation_id, actual, now=now)
        await self._answered()
        return ended

    async def extend_lease(self, reservation_id: str, *, lease_seconds: float, now: float) -> bool:
        await self._called("extend_lease")
        return await super().extend_lease(reservation_id, lease_seconds=lease_seconds, now=now)


class LimiterRig:
    """A limiter, its store, and a clock that the test sets."""

    def __init__(self) -> None:
        self.now = NOW
        self.store = Store()
        self.limiter = Limiter(self.store, LIMITS, clock=lambda: self.now)

    def call(self, **limits: Any) -> Call:
        return a_call(policy=a_policy(tenants=[{"name": "t", "limits": limits or {"concurrency": 1}}]))

    async def is_free(self) -> bool:
        """Whether the only slot is free. Releases it again."""
        try:
            reservation = await self.limiter.admit(self.call())
        except LimitReached:
            return False
        await reservation.release()
        return True


@pytest.fixture
def rig() -> LimiterRig:
    return LimiterRig()


async def test_a_tenant_without_limits_costs_no_storage_call(rig: LimiterRig) -> None:
    reservation = await rig.limiter.admit(a_call())
    assert reservation is UNLIMITED
    assert reservation.headers == {}
    await reservation.settle(Usage(output=5), 5)
    await reservation.release()
    assert rig.store.operations == []


async def test_one_storage_call_to_begin_and_one_to_end(rig: LimiterRig) -> None:
    limits = {"requests": "9/1m", "tokens": "9M/1m", "concurrency": 9, "budget": {"amount": 9}}
    reservation = await rig.limiter.admit(rig.call(**limits))
    assert rig.limiter.open_reservations == 1
    await reservation.settle(Usage(output=5), 5)
    assert rig.store.operations == ["reserve", "settle"]
    assert rig.limiter.open_reservations == 0


async def test_a_reservation_ends_only_once(rig: LimiterRig) -> None:
    reservation = await rig.limiter.admit(rig.call(budget={"amount": "0.000000010"}))
    await asyncio.gather(*(reservation.settle(Usage(), 4) for _ in range(5)), reservation.release())
    assert rig.store.operations == ["reserve", "settle"]
    await (await rig.limiter.admit(rig.call(budget={"amount": "0.000000010"}))).settle(Usage(), 5)
    await rig.limiter.admit(rig.call(budget={"amount": "0.000000010"}))  # nine of ten nanos are spent


async def test_a_dead_gateways_call_is_charged_although_its_model_was_removed(rig: LimiterRig) -> None:
    call = rig.call(budget={"amount": "0.000000010"})
    lost = structs.replace(call, id="lost", model=call.model.model_copy(update={"name": "removed"}))
    await rig.limiter.charge_orphaned(lost, Usage(output=5), 8, admitted=NOW)
    (budget,) = [BudgetLimit.from_policy(scope_limits, scope) for scope, scope_limits in _scopes(call)]
    assert budget is not None
    assert await rig.store.remaining([budget.charge_for(0, NOW)], now=NOW) == (2,)


def _scopes(call: Call) -> Iterable[tuple[Scope, Limits]]:
    principal = call.principal
    return scopes_of_call(principal.tenant, principal.key_id, principal.limits, call.model, call.class_name)


async def test_an_outage_is_logged_once_at_its_beginning_and_once_at_its_end(
    rig: LimiterRig, caplog: pytest.LogCaptureFixture
) -> None:
    rig.store.unreachable = True
    for _ in range(3):
        with pytest.raises(StorageUnavailable):
            await rig.limiter.admit(rig.call())
    rig.store.unreachable = False
    for _ in range(2):
        await (await rig.limiter.admit(rig.call())).release()
    assert [record.getMessage() for record in caplog.records] == [
        "rejecting calls that have limits, because the storage is unreachable: timed out",
        "the storage is reachable again: calls that have limits are admitted",
    ]


async def test_an_unreachable_store_rejects_calls_and_is_counted(rig: LimiterRig) -> None:
    rig.store.unreachable = True
    with pytest.raises(StorageUnavailable):
        await rig.limiter.admit(rig.call())
    assert rig.limiter.storage_failures == 1
    rig.store.unreachable = False
    await rig.limiter.retry_unsettled()
    assert rig.limiter.unsettled == 0
    assert await rig.is_free()


async def test_settling_is_retried_while_the_store_is_unreachable(rig: LimiterRig) -> None:
    reservation = await rig.limiter.admit(rig.call())
    rig.store.unreachable = True
    await reservation.settle(Usage(), 0)  # does not raise
    await rig.limiter.retry_unsettled()
    assert (rig.limiter.unsettled, rig.limiter.storage_failures) == (1, 2)
    rig.store.unreachable = False
    assert not await rig.is_free()
    await rig.limiter.retry_unsettled()
    assert rig.limiter.unsettled == 0
    assert await rig.is_free()


async def test_a_settlement_that_is_impossible_holds_up_no_other_one(
    rig: LimiterRig, caplog: pytest.LogCaptureFixture
) -> None:
    impossible, possible = [await rig.limiter.admit(rig.call(concurrency=9)) for _ in range(2)]
    rig.store.unreachable = True
    await impossible.settle(Usage(), 0)
    await possible.settle(Usage(), 0)
    rig.limiter._unsettled[next(iter(rig.limiter._unsettled))] = [2**64]
    rig.store.unreachable = False
    await rig.limiter.retry_unsettled()
    assert (rig.limiter.unsettled, rig.limiter.settlements_dropped) == (0, 1)
    assert "could not be settled" in caplog.text
    for _ in range(8):  # one slot is held until its lease ends
        await rig.limiter.admit(rig.call(concurrency=9))


async def test_the_lease_of_a_reservation_whose_settlement_fails_ends(rig: LimiterRig) -> None:
    reservation = await rig.limiter.admit(rig.call(concurrency=1, tokens="10000/1d"))
    with pytest.raises(ValueError, match="outside"):
        await reservation.settle(Usage(output=2**64), 0)
    assert rig.limiter.open_reservations == 0
    rig.now += EXTEND_SECONDS
    await rig.limiter.extend_due()
    rig.now += LEASE_SECONDS
    await rig.limiter.admit(rig.call(concurrency=1, tokens="10000/1d"))


async def test_unsettled_reservations_are_bounded(rig: LimiterRig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limiter_module, "MAX_UNSETTLED", 3)
    reservations = [await rig.limiter.admit(rig.call(concurrency=9)) for _ in range(5)]
    rig.store.unreachable = True
    for reservation in reservations:
        await reservation.release()
    assert (rig.limiter.unsettled, rig.limiter.settlements_dropped) == (3, 2)
    rig.store.unreachable = False
    await rig.limiter.retry_unsettled()
    rig.now += LEASE_SECONDS  # the leases of the two that were dropped end
    for _ in range(9):
        await rig.limiter.admit(rig.call(concurrency=9))


async def test_a_client_that_disconnects_during_admission_holds_nothing(rig: LimiterRig) -> None:
    rig.store.slow = True
    admission = asyncio.create_task(rig.limiter.admit(rig.call()))
    await rig.store.operation_done.wait()
    admission.cancel()
    with pytest.raises(asyncio.CancelledError):
        await admission
    rig.store.slow = False
    assert not await rig.is_free()
    await rig.limiter.retry_unsettled()
    assert await rig.is_free()


async def test_settling_survives_cancellation(rig: LimiterRig) -> None:
    """Without an answer it is unknown whether the store has settled, so it is retried, and settles once."""
    limits = {"budget": {"amount": "0.000000010"}}
    reservation = await rig.limiter.admit(rig.call(**limits))
    rig.store.slow = True
    rig.store.operation_done.clear()
    settling = asyncio.create_task(reservation.settle(Usage(), 4))
    await rig.store.operation_done.wait()
    settling.cancel()
    with pytest.raises(asyncio.CancelledError):
        await settling
    rig.store.slow = False
    await rig.limiter.retry_unsettled()
    assert rig.store.operations == ["reserve", "settle", "settle"]
    again = await rig.limiter.admit(rig.call(**limits))
    await again.settle(Usage(), 6)
    assert rig.limiter.unsettled == 0


async def test_leases_of_long_calls_are_extended(rig: LimiterRig) -> None:
    reservation = await rig.limiter.admit(rig.call())
    for _ in range(10):
        rig.now += EXTEND_SECONDS
        await rig.limiter.extend_due()
        assert not await rig.is_free()
    assert rig.store.operations.count("extend_lease") == 10
    await reservation.release()
    rig.now += EXTEND_SECONDS
    await rig.limiter.extend_due()
    assert rig.store.operations.count("extend_lease") == 10


async def test_open_leases_are_extended_after_the_clock_is_set_back(rig: LimiterRig) -> None:
    reservation = await rig.limiter.admit(rig.call())
    rig.now -= 5 * 3600
    await rig.limiter.extend_due()
    assert rig.store.operations.count("extend_lease") == 1
    await rig.limiter.extend_due()
    assert rig.store.operations.count("extend_lease") == 1
    rig.now += EXTEND_SECONDS
    await rig.limiter.extend_due()
    assert rig.store.operations.count("extend_lease") == 2
    await reservation.release()
    assert await rig.is_free()


async def test_a_cost_is_charged_although_the_clock_was_set_ahead(rig: LimiterRig) -> None:
    call = rig.call(budget={"amount": "0.01", "per": "total"}, requests="10/1m")
    reservation = await rig.limiter.admit(call)
    rig.now += 5 * 3600
    await rig.limiter.extend_due()
    await reservation.settle(Usage(output=3), 7_000_000)
    await reservation.settle(Usage(output=3), 7_000_000)
    (account,) = (account for key, account in rig.store._accounts.items() if "budget" in key)
    assert (account.spent, account.held) == (7_000_000, 0)


@pytest.mark.parametrize(("per", "period"), [("hour", "2025-12-31T23"), ("day", "2025-12-31"), ("month", "2025-12")])
async def test_a_call_across_a_period_boundary_is_charged_to_the_period_of_its_admission(
    rig: LimiterRig, per: str, period: str
) -> None:
    call = rig.call(budget={"amount": "1", "per": per})
    rig.now = datetime(2025, 12, 31, 23, 59, 50, tzinfo=UTC).timestamp()
    reservation = await rig.limiter.admit(call)
    rig.now += 20
    await rig.limiter.extend_due()
    await reservation.settle(Usage(output=3), 7_000)
    later = await rig.limiter.admit(structs.replace(call, id="later"))
    await later.settle(Usage(output=1), 5)
    accounts = {key.rpartition("/")[2]: account for key, account in rig.store._accounts.items()}
    assert accounts[period].spent == 7_000
    assert sorted(account.spent for account in accounts.values()) == [5, 7_000]
    assert all(account.held == 0 for account in accounts.values())


async def test_leases_of_short_calls_are_not_extended(rig: LimiterRig) -> None:
    await rig.limiter.admit(rig.call())
    rig.now += EXTEND_SECONDS - 0.1
    await rig.limiter.extend_due()
    assert "extend_lease" not in rig.store.operations


async def test_extending_is_retried_until_the_lease_ends(rig: LimiterRig) -> None:
    await rig.limiter.admit(rig.call())
    rig.store.unreachable = True
    rig.now += EXTEND_SECONDS
    await rig.limiter.extend_due()
    rig.now += EXTEND_SECONDS
    rig.store.unreachable = False
    await rig.limiter.extend_due()
    assert rig.limiter.leases_lost == 0
    rig.now += LEASE_SECONDS
    await rig.limiter.extend_due()
    assert rig.limiter.leases_lost == 1
    assert rig.limiter.open_reservations == 0


async def test_the_background_task_settles_and_extends(rig: LimiterRig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limiter_module, "RETRY_SECONDS", 0.001)
    long = await rig.limiter.admit(rig.call(concurrency=2))
    short = await rig.limiter.admit(rig.call(concurrency=2))
    rig.store.unreachable = True
    await short.release()
    rig.store.unreachable = False
    rig.now += EXTEND_SECONDS
    await rig.limiter.start()
    await rig.limiter.start()
    async with asyncio.timeout(10):
        while rig.limiter.unsettled or "extend_lease" not in rig.store.operations:
            await asyncio.sleep(0)
    rig.store.unreachable = True
    await long.release()
    rig.store.unreachable = False
    await rig.limiter.stop()  # settles what is unsettled
    await rig.limiter.stop()
    assert rig.limiter.unsettled == 0


async def test_settlements_are_retried_in_bounded_batches(rig: LimiterRig) -> None:
    reservations = [await rig.limiter.admit(rig.call(concurrency=1000)) for _ in range(300)]
    rig.store.unreachable = True
    for reservation in reservations:
        await reservation.release()
    before = len(rig.store.operations)
    await rig.limiter.retry_unsettled()
    assert len(rig.store.operations) - before == limiter_module.MAX_CONCURRENT_OPERATIONS  # one failed batch
    rig.store.unreachable = False
    await rig.limiter.retry_unsettled()
    assert rig.limiter.unsettled == 0


async def test_tenants_with_unusual_names_have_their_own_limits(rig: LimiterRig) -> None:
    for name in ("a", "a/b", "a}", "{", "ä ö"):
        policy = a_policy(tenants=[{"name": name, "limits": {"concurrency": 1}}])
        await rig.limiter.admit(a_call(policy=policy, tenant=name))
