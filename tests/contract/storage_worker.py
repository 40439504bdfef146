"""A gateway's share of a store, as a process of its own, for tests that need several or kill one.

Arguments: storage URL, owner, mode. Prints "ready" when the store is open and goes on when it reads a line.
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
    """A busy machine is not what is tested."""
    engine = SqliteStorage if url.startswith("sqlite") else RedisStorage
    return engine(url, owner=owner, timeout_seconds=60.0)


def tokens() -> RateCharge:
    return RateCharge("t/tokens", TOKENS, LIMIT, FOREVER_SECONDS)


async def contend(storage: Storage, owner: str) -> str:
    """All calls at once; the number of those granted. A call that could not be decided was not granted."""

    async def call(number: int) -> bool:
        try:
            verdict = await storage.reserve(
                f"t/{owner}{number}", [tokens()], lease_seconds=LEASE_SECONDS, now=time.time()
            )
        except StorageUnavailable:
            return False
        return isinstance(verdict, Grant)

    return str(sum(await asyncio.gather(*(call(number) for number in range(CALLS)))))


async def hold(storage: Storage, owner: str) -> str:
    """Take the only place and all the money, and keep them."""
    charges: list[Charge] = [SlotCharge("t/concurrency", 1), SpendCharge("t/budget/total", 50, 50, FOREVER_SECONDS)]
    verdict = await storage.reserve(f"t/{owner}", charges, lease_seconds=LEASE_SECONDS, now=time.time())
    return type(verdict).__name__


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
