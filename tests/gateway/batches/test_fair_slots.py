"""Lines of batches take turns by tenant, not by batch."""

from __future__ import annotations

import asyncio

from gateway.batches.fair_slots import FairSlots


async def run_lines(slots: FairSlots, lines: dict[str, int]) -> list[str]:
    """Run each tenant's lines at once, the tenants in order; return the order in which lines got a slot."""
    order: list[str] = []

    async def line(tenant: str) -> None:
        async with slots.slot(tenant, tenant.partition("/")[0]):
            order.append(tenant)
            await asyncio.sleep(0)

    await asyncio.gather(*(line(tenant) for tenant, count in lines.items() for _ in range(count)))
    return order


async def test_a_tenant_with_one_line_waits_for_one_line_of_another() -> None:
    order = await run_lines(FairSlots(1), {"many": 50, "one": 1, "few": 3})
    assert order.index("one") <= 2
    assert order[:8].count("few") == 3
    assert len(order) == 54


async def test_an_organisation_takes_the_turns_of_one_tenant() -> None:
    order = await run_lines(FairSlots(1), {**{f"organisation/{team}": 5 for team in range(20)}, "alone": 5})
    assert order[:11].count("alone") == 5
    assert len(set(order[:21])) >= 15, "its teams take turns"


async def test_the_number_of_lines_is_bounded_and_no_slot_is_lost_when_lines_are_cancelled() -> None:
    slots, running, most = FairSlots(3), 0, 0

    async def line(tenant: str) -> None:
        nonlocal running, most
        async with slots.slot(tenant):
            running += 1
            most = max(most, running)
            try:
                await asyncio.sleep(0)
            finally:
                running -= 1

    lines = [asyncio.create_task(line(f"t{number % 4}")) for number in range(60)]
    await asyncio.sleep(0)
    for each in lines[::2]:
        each.cancel()
    await asyncio.gather(*lines, return_exceptions=True)
    assert running == 0 and most <= 3
    assert await asyncio.wait_for(run_lines(slots, {"t": 10}), 5) == ["t"] * 10
