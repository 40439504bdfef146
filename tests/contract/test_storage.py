"""The contract of the storage ports, run over every engine: reservations, leases and limits.

The engines are in memory, on a real file, and in a real Redis. `test_storage_documents.py` and
`test_storage_records.py` are the rest of the contract.
"""

from __future__ import annotations

import asyncio
import math
from pathlib import Path
from typing import Any

import pytest

from gateway.storage import open_storage
from gateway.storage.base import (
    HELD_RETRY_SECONDS,
    REMEMBER_SECONDS,
    Charge,
    Grant,
    RateCharge,
    Rejection,
    SlotCharge,
    SpendCharge,
    Storage,
)
from gateway.storage.memory import MemoryStorage
from gateway.storage.redis import RedisStorage
from gateway.storage.sqlite import SqliteStorage
from tests.contract.storage_times import LEASE_SECONDS, NOW


async def reserve(
    storage: Storage, name: str, *charges: Charge, now: float = NOW, lease_seconds: float = LEASE_SECONDS
) -> Grant | Rejection:
    return await storage.reserve(name, charges, lease_seconds=lease_seconds, now=now)


def about(seconds: float) -> Any:
    return pytest.approx(seconds, abs=0.01)


def rate(tenant: str, amount: int, *, limit: int = 100, period_seconds: float = 100.0) -> RateCharge:
    return RateCharge(f"{tenant}/tokens", amount, limit, period_seconds)


def spend(tenant: str, amount: int, *, limit: int = 100) -> SpendCharge:
    return SpendCharge(f"{tenant}/budget/2026-11", amount, limit, 86_400.0)


def slot(tenant: str, *, limit: int = 2) -> SlotCharge:
    return SlotCharge(f"{tenant}/concurrency", limit)


class TestRate:
    async def test_a_burst_is_at_most_the_limit(self, storage: Storage, tenant: str) -> None:
        assert await reserve(storage, f"{tenant}/a", rate(tenant, 60)) == Grant((40,))
        refused = await reserve(storage, f"{tenant}/b", rate(tenant, 50))
        assert refused == Rejection(0, 40, about(10.0))
        assert await reserve(storage, f"{tenant}/c", rate(tenant, 40)) == Grant((0,))

    async def test_refills_steadily(self, storage: Storage, tenant: str) -> None:
        await reserve(storage, f"{tenant}/a", rate(tenant, 100))
        assert isinstance(await reserve(storage, f"{tenant}/b", rate(tenant, 26), now=NOW + 25), Rejection)
        assert await reserve(storage, f"{tenant}/c", rate(tenant, 25), now=NOW + 25) == Grant((0,))
        assert await reserve(storage, f"{tenant}/d", rate(tenant, 1), now=NOW + 1000) == Grant((99,))

    async def test_retry_after_is_exactly_long_enough(self, storage: Storage, tenant: str) -> None:
        charge = rate(tenant, 1, limit=7, period_seconds=60.0)
        for number in range(7):
            await reserve(storage, f"{tenant}/{number}", charge)
        refused = await reserve(storage, f"{tenant}/x", charge)
        assert isinstance(refused, Rejection) and refused.retry_after_seconds is not None
        assert isinstance(
            await reserve(storage, f"{tenant}/y", charge, now=NOW + refused.retry_after_seconds - 0.001), Rejection
        )
        assert isinstance(await reserve(storage, f"{tenant}/z", charge, now=NOW + refused.retry_after_seconds), Grant)

    async def test_more_than_the_limit_is_never_granted(self, storage: Storage, tenant: str) -> None:
        assert await reserve(storage, f"{tenant}/a", rate(tenant, 101)) == Rejection(0, 100, None)

    async def test_settling_returns_the_unused_amount(self, storage: Storage, tenant: str) -> None:
        await reserve(storage, f"{tenant}/a", rate(tenant, 100))
        assert await storage.settle(f"{tenant}/a", [30], now=NOW)
        assert await reserve(storage, f"{tenant}/b", rate(tenant, 70)) == Grant((0,))

    async def test_usage_beyond_the_reservation_becomes_debt(self, storage: Storage, tenant: str) -> None:
        await reserve(storage, f"{tenant}/a", rate(tenant, 50))
        assert await storage.settle(f"{tenant}/a", [170], now=NOW)
        refused = await reserve(storage, f"{tenant}/b", rate(tenant, 1))
        assert refused == Rejection(0, 0, about(71.0))

    async def test_a_refund_excludes_what_has_refilled_meanwhile(self, storage: Storage, tenant: str) -> None:
        """A naive refund would grant 198 in one instant: see `leaky_bucket`."""
        await reserve(storage, f"{tenant}/a", rate(tenant, 100), lease_seconds=200.0)
        later = NOW + 99
        assert await reserve(storage, f"{tenant}/b", rate(tenant, 98), now=later) == Grant((1,))
        assert await storage.settle(f"{tenant}/a", [0], now=later)
        assert await reserve(storage, f"{tenant}/c", rate(tenant, 3), now=later) == Rejection(0, 2, about(1.0))
        assert isinstance(await reserve(storage, f"{tenant}/d", rate(tenant, 2), now=later), Grant)

    async def test_a_bucket_that_was_never_empty_refunds_everything(self, storage: Storage, tenant: str) -> None:
        """A call longer than the period, at saturation: its whole unused amount is refunded."""
        await reserve(storage, f"{tenant}/long", rate(tenant, 50))
        await reserve(storage, f"{tenant}/0", rate(tenant, 50))
        for step in range(1, 21):
            now = NOW + 10 * step
            assert await reserve(storage, f"{tenant}/{step}", rate(tenant, 10), now=now) == Grant((0,))
            assert await storage.extend_lease(f"{tenant}/long", lease_seconds=LEASE_SECONDS, now=now)
        assert await storage.settle(f"{tenant}/long", [0], now=NOW + 200)
        assert await reserve(storage, f"{tenant}/next", rate(tenant, 50), now=NOW + 200) == Grant((0,))

    async def test_refunds_out_of_order(self, storage: Storage, tenant: str) -> None:
        """If neither a nor x had used anything, the bucket would have been empty before b. So only b's 10 are in it."""
        steps = [("z", 60, 0), ("x", 40, 50), ("a", 50, 51), ("b", 10, 80)]
        for name, amount, after in steps:
            granted = await reserve(
                storage, f"{tenant}/{name}", rate(tenant, amount), now=NOW + after, lease_seconds=200.0
            )
            assert isinstance(granted, Grant)
        assert await storage.settle(f"{tenant}/a", [0], now=NOW + 80)
        assert await storage.settle(f"{tenant}/x", [0], now=NOW + 80)
        assert await reserve(storage, f"{tenant}/c", rate(tenant, 1), now=NOW + 80) == Grant((89,))


class TestSlots:
    async def test_at_most_the_limit_of_slots(self, storage: Storage, tenant: str) -> None:
        assert await reserve(storage, f"{tenant}/a", slot(tenant)) == Grant((1,))
        assert await reserve(storage, f"{tenant}/b", slot(tenant)) == Grant((0,))
        assert await reserve(storage, f"{tenant}/c", slot(tenant)) == Rejection(0, 0, HELD_RETRY_SECONDS)
        assert await storage.settle(f"{tenant}/a", [0], now=NOW)
        assert await reserve(storage, f"{tenant}/d", slot(tenant)) == Grant((0,))

    async def test_a_slot_returns_when_its_lease_ends(self, storage: Storage, tenant: str) -> None:
        await reserve(storage, f"{tenant}/a", slot(tenant, limit=1))
        before, after = NOW + LEASE_SECONDS - 0.001, NOW + LEASE_SECONDS
        assert isinstance(await reserve(storage, f"{tenant}/b", slot(tenant, limit=1), now=before), Rejection)
        assert isinstance(await reserve(storage, f"{tenant}/c", slot(tenant, limit=1), now=after), Grant)

    async def test_extending_the_lease_keeps_slots_and_budget(self, storage: Storage, tenant: str) -> None:
        await reserve(storage, f"{tenant}/a", slot(tenant, limit=1), spend(tenant, 60))
        assert await storage.extend_lease(f"{tenant}/a", lease_seconds=LEASE_SECONDS, now=NOW + 20)
        assert await storage.extend_lease(f"{tenant}/a", lease_seconds=LEASE_SECONDS, now=NOW + 40)
        assert isinstance(await reserve(storage, f"{tenant}/b", slot(tenant, limit=1), now=NOW + 69), Rejection)
        assert isinstance(await reserve(storage, f"{tenant}/c", spend(tenant, 41), now=NOW + 69), Rejection)
        assert isinstance(await reserve(storage, f"{tenant}/d", slot(tenant, limit=1), now=NOW + 70), Grant)

    async def test_a_lease_that_has_ended_cannot_be_extended(self, storage: Storage, tenant: str) -> None:
        assert not await storage.extend_lease(f"{tenant}/never", lease_seconds=LEASE_SECONDS, now=NOW)
        await reserve(storage, f"{tenant}/a", slot(tenant))
        assert not await storage.extend_lease(f"{tenant}/a", lease_seconds=LEASE_SECONDS, now=NOW + LEASE_SECONDS)
        await reserve(storage, f"{tenant}/b", slot(tenant))
        await storage.settle(f"{tenant}/b", [0], now=NOW)
        assert not await storage.extend_lease(f"{tenant}/b", lease_seconds=LEASE_SECONDS, now=NOW)

    async def test_release_slots_keeps_the_budget_and_the_rates(self, storage: Storage, tenant: str) -> None:
        await reserve(storage, f"{tenant}/a", slot(tenant, limit=1), spend(tenant, 60), rate(tenant, 60))
        assert await storage.release_slots(f"{tenant}/a", now=NOW)
        assert not await storage.release_slots(f"{tenant}/a", now=NOW)
        assert isinstance(await reserve(storage, f"{tenant}/b", spend(tenant, 41)), Rejection)
        assert isinstance(await reserve(storage, f"{tenant}/b", rate(tenant, 41)), Rejection)
        assert isinstance(await reserve(storage, f"{tenant}/b", slot(tenant, limit=1)), Grant)
        # Extending its lease takes no slot. Neither settling it nor the end of its lease frees another call's slot.
        assert await storage.extend_lease(f"{tenant}/a", lease_seconds=LEASE_SECONDS, now=NOW)
        assert await storage.settle(f"{tenant}/a", [1, 20, 20], now=NOW)
        assert isinstance(await reserve(storage, f"{tenant}/c", slot(tenant, limit=1)), Rejection)
        assert await reserve(storage, f"{tenant}/d", spend(tenant, 80), rate(tenant, 80)) == Grant((0, 0))

    async def test_the_end_of_a_lease_without_slots_frees_no_slot_of_another_call(
        self, storage: Storage, tenant: str
    ) -> None:
        await reserve(storage, f"{tenant}/a", slot(tenant, limit=1))
        assert await storage.release_slots(f"{tenant}/a", now=NOW)
        later = NOW + LEASE_SECONDS - 1
        assert isinstance(await reserve(storage, f"{tenant}/b", slot(tenant, limit=1), now=later), Grant)
        assert isinstance(await reserve(storage, f"{tenant}/c", slot(tenant, limit=1), now=later + 2), Rejection)

    async def test_release_slots_without_slots_changes_nothing(self, storage: Storage, tenant: str) -> None:
        assert not await storage.release_slots(f"{tenant}/unknown", now=NOW)
        await reserve(storage, f"{tenant}/a", spend(tenant, 60))
        assert not await storage.release_slots(f"{tenant}/a", now=NOW)
        assert await storage.settle(f"{tenant}/a", [60], now=NOW)


class TestSpend:
    async def test_spent_and_held_stay_within_the_limit(self, storage: Storage, tenant: str) -> None:
        assert await reserve(storage, f"{tenant}/a", spend(tenant, 60)) == Grant((40,))
        assert await reserve(storage, f"{tenant}/b", spend(tenant, 50)) == Rejection(0, 40, HELD_RETRY_SECONDS)
        assert await storage.settle(f"{tenant}/a", [55], now=NOW)
        assert await reserve(storage, f"{tenant}/c", spend(tenant, 46)) == Rejection(0, 45, None)
        assert await reserve(storage, f"{tenant}/d", spend(tenant, 45)) == Grant((0,))

    async def test_a_held_budget_returns_when_its_lease_ends(self, storage: Storage, tenant: str) -> None:
        await reserve(storage, f"{tenant}/a", spend(tenant, 60))
        assert await reserve(storage, f"{tenant}/b", spend(tenant, 100), now=NOW + LEASE_SECONDS) == Grant((0,))

    async def test_usage_is_counted_after_the_lease_has_ended(self, storage: Storage, tenant: str) -> None:
        await reserve(storage, f"{tenant}/a", spend(tenant, 60))
        assert await storage.settle(f"{tenant}/a", [60], now=NOW + LEASE_SECONDS + REMEMBER_SECONDS - 1)
        assert await reserve(storage, f"{tenant}/b", spend(tenant, 41), now=NOW + 60) == Rejection(0, 40, None)

    async def test_a_reservation_is_forgotten_remember_seconds_after_its_lease(
        self, storage: Storage, tenant: str
    ) -> None:
        await reserve(storage, f"{tenant}/a", spend(tenant, 60))
        assert not await storage.settle(f"{tenant}/a", [60], now=NOW + LEASE_SECONDS + REMEMBER_SECONDS)
        assert await reserve(storage, f"{tenant}/b", spend(tenant, 100), now=NOW + 60) == Grant((0,))

    async def test_a_reservation_of_zero_can_still_spend(self, storage: Storage, tenant: str) -> None:
        """A call without a price reserves zero, which the Redis script treats separately."""
        assert await reserve(storage, f"{tenant}/a", spend(tenant, 0)) == Grant((100,))
        assert await storage.settle(f"{tenant}/a", [120], now=NOW)
        assert await reserve(storage, f"{tenant}/b", spend(tenant, 0)) == Rejection(0, 0, None)

    async def test_sums_are_exact_beyond_the_precision_of_a_double(self, storage: Storage, tenant: str) -> None:
        limit = 2**54 + 4
        for number, amount in enumerate([2**53 + 1, 2**53 + 1, 2]):
            charge = SpendCharge(f"{tenant}/budget/total", amount, limit, math.inf)
            await reserve(storage, f"{tenant}/{number}", charge)
            await storage.settle(f"{tenant}/{number}", [amount], now=NOW)
        charge = SpendCharge(f"{tenant}/budget/total", 1, limit, math.inf)
        assert await reserve(storage, f"{tenant}/x", charge) == Rejection(0, 0, None)


class TestReservation:
    async def test_all_or_none(self, storage: Storage, tenant: str) -> None:
        charges = rate(tenant, 10), slot(tenant), spend(tenant, 60)
        assert await reserve(storage, f"{tenant}/a", *charges) == Grant((90, 1, 40))
        for number in range(5):
            assert await reserve(storage, f"{tenant}/no{number}", *charges) == Rejection(2, 40, HELD_RETRY_SECONDS)
        assert await reserve(storage, f"{tenant}/b", rate(tenant, 1), slot(tenant)) == Grant((89, 0))

    async def test_a_rejection_names_the_first_charge_that_does_not_fit(self, storage: Storage, tenant: str) -> None:
        await reserve(storage, f"{tenant}/a", slot(tenant, limit=1), spend(tenant, 100))
        refused = await reserve(storage, f"{tenant}/b", rate(tenant, 1), spend(tenant, 1), slot(tenant, limit=1))
        assert refused == Rejection(1, 0, HELD_RETRY_SECONDS)

    async def test_exactly_one_of_many_concurrent_settlements_counts(self, storage: Storage, tenant: str) -> None:
        await reserve(storage, f"{tenant}/a", rate(tenant, 60), slot(tenant, limit=1), spend(tenant, 60))
        ended = await asyncio.gather(*(storage.settle(f"{tenant}/a", [50, 0, 40], now=NOW) for _ in range(20)))
        assert sorted(ended) == [False] * 19 + [True]
        left = await reserve(storage, f"{tenant}/b", rate(tenant, 1), slot(tenant, limit=1), spend(tenant, 1))
        assert left == Grant((49, 0, 59))

    async def test_concurrent_calls_share_one_limit(self, storage: Storage, tenant: str) -> None:
        """Another gateway granted 663 tokens on a limit of 100 to concurrent calls."""
        amounts = [7 + number % 4 for number in range(80)]
        outcomes = await asyncio.gather(
            *(reserve(storage, f"{tenant}/{number}", rate(tenant, amount)) for number, amount in enumerate(amounts))
        )
        granted = sum(amount for amount, outcome in zip(amounts, outcomes, strict=True) if isinstance(outcome, Grant))
        assert 93 < granted <= 100

    async def test_tenants_do_not_share(self, storage: Storage, tenant: str) -> None:
        await reserve(storage, f"{tenant}/a", rate(tenant, 100), slot(tenant, limit=1), spend(tenant, 100))
        other = f"{tenant}%7D%7B"
        mine = rate(other, 100), slot(other, limit=1), spend(other, 100)
        assert await reserve(storage, f"{other}/a", *mine) == Grant((0, 0, 0))

    async def test_a_reservation_without_charges(self, storage: Storage, tenant: str) -> None:
        assert await reserve(storage, f"{tenant}/a") == Grant(())
        assert await storage.settle(f"{tenant}/a", [], now=NOW)

    async def test_invalid_arguments_raise_value_error(self, storage: Storage, tenant: str) -> None:
        await reserve(storage, f"{tenant}/a", slot(tenant))
        with pytest.raises(ValueError, match="already open"):
            await reserve(storage, f"{tenant}/a", slot(tenant))
        with pytest.raises(ValueError, match="occurs twice"):
            await reserve(storage, f"{tenant}/b", slot(tenant), slot(tenant))
        with pytest.raises(ValueError, match="another tenant"):
            await reserve(storage, f"{tenant}/b", slot("another"))
        with pytest.raises(ValueError, match="1 charges, but is settled with 2"):
            await storage.settle(f"{tenant}/a", [0, 0], now=NOW)
        with pytest.raises(ValueError, match="outside"):
            await storage.settle(f"{tenant}/a", [-1], now=NOW)
        with pytest.raises(ValueError, match="outside"):
            await reserve(storage, f"{tenant}/b", spend(tenant, -1))
        assert await storage.settle(f"{tenant}/a", [0], now=NOW)

    async def test_expire_leases_ends_all_leases_of_an_owner(self, storage: Storage, tenant: str) -> None:
        charges = rate(tenant, 60), slot(tenant, limit=1), spend(tenant, 60)
        await reserve(storage, f"{tenant}/a", *charges)
        assert await storage.expire_leases("another owner", now=NOW) == 0
        assert await storage.expire_leases("me", now=NOW) == 1
        assert await storage.expire_leases("me", now=NOW) == 0
        assert not await storage.extend_lease(f"{tenant}/a", lease_seconds=LEASE_SECONDS, now=NOW)
        left = await reserve(storage, f"{tenant}/b", rate(tenant, 1), slot(tenant, limit=1), spend(tenant, 1))
        assert left == Grant((39, 0, 99))
        assert await storage.settle(f"{tenant}/a", [10, 0, 10], now=NOW)  # the process of that owner was only draining
        assert await reserve(storage, f"{tenant}/c", rate(tenant, 1), spend(tenant, 1)) == Grant((88, 88))


async def test_open_and_close_twice(storage: Storage, tenant: str) -> None:
    await storage.open()
    assert isinstance(await reserve(storage, f"{tenant}/a", slot(tenant)), Grant)
    await storage.close()
    await storage.close()


def test_every_url_scheme_has_its_engine(tmp_path: Path) -> None:
    assert isinstance(open_storage("memory://"), MemoryStorage)
    assert isinstance(open_storage(f"sqlite:///{tmp_path / 'x.db'}"), SqliteStorage)
    for url in "redis://127.0.0.1:1/0", "rediss://127.0.0.1:1", "unix:///run/redis.sock":
        assert isinstance(open_storage(url), RedisStorage)


@pytest.mark.parametrize("url", ["postgres://user:secret@host/db", "memory", "sqlite:state.db", ""])
def test_the_error_for_an_unknown_scheme_lists_the_valid_ones(url: str) -> None:
    with pytest.raises(ValueError, match="memory://, sqlite://, redis://, rediss://, unix://") as raised:
        open_storage(url)
    assert "secret" not in str(raised.value)


def test_sqlite_needs_a_path() -> None:
    with pytest.raises(ValueError, match="needs a path"):
        open_storage("sqlite://state.db")


async def test_force_reserve_takes_charges_beyond_their_limits(storage: Storage, tenant: str) -> None:
    charges: list[Charge] = [
        RateCharge(f"{tenant}/tokens", 15, 10, 100.0),
        SlotCharge(f"{tenant}/slots", 1),
        SpendCharge(f"{tenant}/budget", 70, 50, 1e6),
    ]
    for name in ("a", "b", "b"):  # a second time changes nothing
        await storage.force_reserve(f"{tenant}/{name}", charges, lease_seconds=LEASE_SECONDS, now=NOW)
    assert await storage.remaining(charges, now=NOW) == (0, 0, 0)
    assert await storage.settle(f"{tenant}/a", [2, 0, 20], now=NOW)
    assert await storage.settle(f"{tenant}/b", [2, 0, 20], now=NOW)
    assert not await storage.settle(f"{tenant}/b", [2, 0, 20], now=NOW)
    assert await storage.remaining(charges, now=NOW) == (6, 1, 10)


async def test_a_forced_reservation_is_a_lease(storage: Storage, tenant: str) -> None:
    slot_charge = SlotCharge(f"{tenant}/slots", 1)
    await storage.force_reserve(f"{tenant}/a", [slot_charge], lease_seconds=LEASE_SECONDS, now=NOW)
    assert await storage.extend_lease(f"{tenant}/a", lease_seconds=LEASE_SECONDS, now=NOW + 20)
    assert await storage.remaining([slot_charge], now=NOW + LEASE_SECONDS) == (0,)
    assert await storage.remaining([slot_charge], now=NOW + 20 + LEASE_SECONDS) == (1,)


async def test_remaining_reserves_nothing(storage: Storage, tenant: str) -> None:
    charges: list[Charge] = [
        RateCharge(f"{tenant}/tokens", 3, 10, 100.0),
        SlotCharge(f"{tenant}/slots", 2),
        SpendCharge(f"{tenant}/budget", 8, 50, 1e6),
    ]
    assert await storage.remaining(charges, now=NOW) == (10, 2, 50)
    await storage.reserve(f"{tenant}/a", charges, lease_seconds=LEASE_SECONDS, now=NOW)
    for _ in range(2):
        assert await storage.remaining(charges, now=NOW) == (7, 1, 42)
    assert await storage.remaining([], now=NOW) == ()


async def test_a_replica_is_counted_while_it_reports(storage: Storage) -> None:
    assert await storage.count_replicas(alive_seconds=10.0, now=NOW) == 1
    assert await storage.count_replicas(alive_seconds=10.0, now=NOW + 60) == 1


async def test_a_call_that_reserves_zero_may_outlive_its_account(storage: Storage, tenant: str) -> None:
    """It holds nothing, so the account is deleted while the call runs."""
    free = SpendCharge(f"{tenant}/budget", 0, 50, keep_seconds=10.0)
    await storage.reserve(f"{tenant}/a", [free], lease_seconds=LEASE_SECONDS, now=NOW)
    for seconds in (20.0, 40.0, 60.0):
        assert await storage.extend_lease(f"{tenant}/a", lease_seconds=LEASE_SECONDS, now=NOW + seconds)
    assert await storage.settle(f"{tenant}/a", [5], now=NOW + 80)
    assert await storage.remaining([free], now=NOW + 80) == (45,)


@pytest.mark.parametrize("back_seconds", [60.0, 5 * 3600.0])
async def test_a_rate_refills_after_the_clock_was_set_back(storage: Storage, back_seconds: float, tenant: str) -> None:
    now = NOW - back_seconds
    await reserve(storage, f"{tenant}/a", rate(tenant, 60))
    await reserve(storage, f"{tenant}/b", rate(tenant, 40), now=NOW + 10)
    assert await storage.remaining([rate(tenant, 0)], now=now) == (10,)
    assert await storage.settle(f"{tenant}/b", [0], now=now)
    (left,) = await storage.remaining([rate(tenant, 0)], now=now)
    assert 10 <= left <= 50  # how much of it had leaked before is unknown
    assert isinstance(await reserve(storage, f"{tenant}/c", rate(tenant, 10), now=now), Grant)
    assert await storage.remaining([rate(tenant, 0)], now=now + 100) == (100,)


async def test_a_lease_ends_after_the_clock_was_set_back(storage: Storage, tenant: str) -> None:
    now = NOW - 5 * 3600
    charges: list[Charge] = [slot(tenant, limit=1), spend(tenant, 60)]
    await reserve(storage, f"{tenant}/a", *charges)
    if isinstance(storage, MemoryStorage):  # whose reservations end with the process, so a live call settles
        assert await storage.settle(f"{tenant}/a", [0, 0], now=now)
    assert await storage.remaining(charges, now=now) == (1, 100)


async def test_an_extended_lease_survives_the_clock_being_set_back(storage: Storage, tenant: str) -> None:
    now = NOW - 5 * 3600
    charges: list[Charge] = [slot(tenant, limit=1), spend(tenant, 60)]
    await reserve(storage, f"{tenant}/a", *charges)
    assert await storage.extend_lease(f"{tenant}/a", lease_seconds=LEASE_SECONDS, now=now)
    assert await storage.remaining(charges, now=now + 1) == (0, 40)
    assert await storage.settle(f"{tenant}/a", [0, 7], now=now + 2)
    assert await storage.remaining(charges, now=now + 2) == (1, 93)
