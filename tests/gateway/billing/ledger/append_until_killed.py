"""Run by the kill -9 test: appends receipts as fast as possible, and prints each event id once it is written."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

from gateway.billing.ledger import Ledger
from tests.gateway.billing.ledger.receipts import a_receipt


async def main(directory: Path) -> None:
    async with Ledger(directory, "replica", segment_bytes=20_000) as ledger:
        while True:
            receipt = a_receipt()
            ledger.append(receipt)
            os.write(1, f"{receipt.event_id}\n".encode())
            await asyncio.sleep(0)


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
