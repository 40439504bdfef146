"""CPU cost of limits per call: microseconds in the gateway for admission and settlement together.

    python benchmarks/limits.py [--calls 20000] [--redis URL] [--result FILE]

One row per number of limits, with the storage in memory and, with `--redis`, on that server with 64 concurrent calls.
Redis's CPU is not counted. The first row is the storage alone.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import time
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from gateway.limits import LIMITS
from gateway.limits.limiter import Limiter
from gateway.limits.outage_fallback import OutageFallback
from gateway.policy import Limits, Policy, StorageOutage
from gateway.storage import open_storage
from gateway.storage.base import Charge, RateCharge, SlotCharge, SpendCharge, Storage
from gateway.storage.memory import MemoryStorage
from gateway.types import Call, Operation, Principal, Trace, Usage

ROUNDS = 5
CONCURRENT_CALLS = 64
FOUR_LIMITS = {"requests": "1G/1m", "tokens": "1G/1m", "concurrency": "1M", "budget": {"amount": 1_000_000}}
TENANTS: dict[str, dict[str, Any]] = {
    "no limit": {},
    "requests and tokens": {"requests": "1G/1m", "tokens": "1G/1m"},
    "four limits": FOUR_LIMITS,
    "twelve, in three scopes": {**FOUR_LIMITS, "parts": [{"match": {"model": "m"}, **FOUR_LIMITS}]},
}
USAGE = Usage(input_uncached=90, output=30, exact=True)

Work = Callable[[int], Awaitable[None]]


def calls_of(limits: dict[str, Any], key_limits: Limits | None, count: int) -> list[Call]:
    policy = Policy.model_validate(
        {
            "deployments": [
                {
                    "name": "a", "base_url": "http://127.0.0.1:8000/v1", "model": "m",
                    "price": {"input": 1, "output": 2},
                }
            ],
            "models": [{"name": "m", "deployments": ["a"]}],
            "tenants": [{"name": "t", "limits": limits}],
        }
    )  # fmt: skip
    one = Call(
        id="", operation=Operation.CHAT, principal=Principal(policy.tenants[0], "k", limits=key_limits), policy=policy,
        asked_model="m", model=policy.models[0], class_name="realtime", latency_class=policy.classes["realtime"],
        stream=True, include_usage=True, max_output_tokens=64, deterministic=False, fields={}, fingerprint=(),
        prompt_tokens_estimate=100, cache_salt="", service_tier=None, end_user=None, canonical_steps=(),
        class_rule=None, deadline=0.0, trace=Trace(1, 0, sampled=False),
    )  # fmt: skip
    start = time.time_ns()
    return [msgspec.structs.replace(one, id=f"{start}-{number}") for number in range(count)]


def storage_alone() -> Work:
    store = MemoryStorage()
    charges: list[Charge] = [
        RateCharge("t/requests", 1, 10**9, 60.0),
        RateCharge("t/tokens", 164, 10**9, 60.0),
        SlotCharge("t/concurrency", 10**6),
        SpendCharge("t/budget/2026-11", 228_000, 10**15, 62 * 86_400.0),
    ]
    start = time.time()

    async def work(number: int) -> None:
        now = start + number / 1000
        await store.reserve(f"t/{number}", charges, lease_seconds=30.0, now=now)
        await store.settle(f"t/{number}", [1, 120, 0, 150_000], now=now)

    return work


def limiter_on(storage: Storage, calls: list[Call]) -> Work:
    outage = StorageOutage()
    limiter = Limiter(OutageFallback(storage, MemoryStorage, lambda: outage), LIMITS)

    async def work(number: int) -> None:
        reservation = await limiter.admit(calls[number])
        await reservation.release_slot()
        await reservation.settle(USAGE, 150_000)

    return work


async def micros_of(make_work: Callable[[], Work], calls: int, at_once: int) -> float:
    """CPU microseconds per call: the minimum over the rounds, since other processes only add time."""
    best = float("inf")
    for _ in range(ROUNDS):
        work, numbers = make_work(), iter(range(calls))

        async def lane(work: Work = work, numbers: Any = numbers) -> None:
            for number in numbers:
                await work(number)

        started = time.process_time()
        if at_once == 1:
            await lane()
        else:
            await asyncio.gather(*(lane() for _ in range(at_once)))
        best = min(best, (time.process_time() - started) / calls * 1e6)
    return best


async def measure(calls: int, redis: str | None) -> dict[str, dict[str, float]]:
    rows: dict[str, dict[str, float]] = {"the storage alone, four limits": {}}
    rows["the storage alone, four limits"]["memory"] = await micros_of(storage_alone, calls, 1)
    storage = open_storage(redis) if redis else None
    if storage is not None:
        await storage.open()
    for name, limits in TENANTS.items():
        key_limits = Limits.model_validate(FOUR_LIMITS) if "parts" in limits else None

        def in_memory(limits: dict[str, Any] = limits, key_limits: Limits | None = key_limits) -> Work:
            return limiter_on(MemoryStorage(), calls_of(limits, key_limits, calls))

        rows[name] = {"memory": await micros_of(in_memory, calls, 1)}
        if storage is not None:

            def in_redis(
                limits: dict[str, Any] = limits, key_limits: Limits | None = key_limits, storage: Storage = storage
            ) -> Work:
                return limiter_on(storage, calls_of(limits, key_limits, calls // 4))

            rows[name]["redis"] = await micros_of(in_redis, calls // 4, CONCURRENT_CALLS)
    if storage is not None:
        await storage.close()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=20_000)
    parser.add_argument("--redis", metavar="URL", help="a Redis for this benchmark alone, which writes to the tenant t")
    parser.add_argument("--result", type=Path, help="write the figures to this file, as JSON")
    options = parser.parse_args()
    machine = f"{platform.processor() or platform.machine()}, {os.cpu_count()} CPUs, Python {platform.python_version()}"
    rows = asyncio.run(measure(options.calls, options.redis))
    print(machine)
    for name, row in rows.items():
        print(f"{name:36}" + "".join(f"{store:>10} {micros:6.1f} us" for store, micros in row.items()))
    if options.result:
        found = {"machine": machine, "date": datetime.now(UTC).date().isoformat(), "unit": "us"}
        found["load_average"] = f"{os.getloadavg()[0]:.1f}"
        rounded = {name: {store: round(micros, 1) for store, micros in row.items()} for name, row in rows.items()}
        options.result.write_text(json.dumps({**found, "rows": rounded}, indent=1) + "\n")


if __name__ == "__main__":
    main()
