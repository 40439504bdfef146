"""A process that uses a storage engine, for tests that need several processes or kill one.

Arguments: storage URL, owner, mode. Prints "ready" once the store is open, and proceeds when it reads a line.
"""

from __future__ import annotations

import asyncio
import sys
import time

from gateway.core.errors import StorageUnavailable
from gateway.storage.base import Charge, Grant, RateCharge, SlotCharge, SpendCharge, Storage
from gateway.storage.redis import RedisStorage
from gateway.storage.sqlite import SqliteStorage

CALLS, TOKENS, LIMIT = 200, 7, 100
FOREVER_SECONDS = 1e9  # nothing refills while a test runs
LEASE_SECONDS = 600.0


def patient(url: str, owner: str) -> Storage:
    """A storage with a long timeout: these tests must not fail on a busy machine."""
    engine = SqliteStorage if url.startswith("sqlite") else RedisStorage
    return engine(url, owner=owner, timeout_seconds=60.0)


def tokens() -> RateCharge:
    return RateCharge("t/tokens", TOKENS, LIMIT, FOREVER_SECONDS)


async def contend(storage: Storage, owner: str) -> str:
    """Reserve for all calls concurrently. Returns how many were granted; one that timed out does not count."""

    async def call(number: int) -> bool:
        try:
            outcome = await storage.reserve(
                f"t/{owner}{number}", [tokens()], lease_seconds=LEASE_SECONDS, now=time.time()
            )
        except StorageUnavailable:
            return False
        return isinstance(outcome, Grant)

    return str(sum(await asyncio.gather(*(call(number) for number in range(CALLS)))))


async def hold(storage: Storage, owner: str) -> str:
    """Take the only slot and the whole budget, and keep them."""
    charges: list[Charge] = [SlotCharge("t/concurrency", 1), SpendCharge("t/budget/total", 50, 50, FOREVER_SECONDS)]
    outcome = await storage.reserve(f"t/{owner}", charges, lease_seconds=LEASE_SECONDS, now=time.time())
    return type(outcome).__name__


async def main(url: str, owner: str, mode: str) -> None:
    storage = patient(url, owner)
    await storage.open()
    print("ready", flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)
    print(await (contend if mode == "contend" else hold)(storage, owner), flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)
    await storage.close()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
