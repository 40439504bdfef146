"""`warmpath usage collect`, from a real Redis into a folder that the other subcommands read."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

from typer.testing import CliRunner

from gateway.billing.ledger import Ledger
from gateway.billing.ledger.shipper import Shipper
from gateway.cli import app
from tests.gateway.billing.ledger.receipts import a_receipt
from tests.redis_server import RedisServer, own_redis_server

__all__ = ["own_redis_server"]


def warmpath(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["usage", *arguments])
    return result.exit_code, result.output


def test_collected_rows_form_a_ledger(tmp_path: Path, own_redis_server: RedisServer) -> None:
    async def ship() -> None:
        async with Ledger(tmp_path / "a", "one") as ledger:
            ledger.append(a_receipt())
            await ledger.durable()
            shipper = Shipper(own_redis_server.url, ledger, "one")
            running = asyncio.create_task(shipper.run())
            while not shipper.rows_shipped:
                await asyncio.sleep(0.01)
            running.cancel()
            await asyncio.wait([running])

    asyncio.run(ship())
    into = str(tmp_path / "all")
    code, said = warmpath("collect", into, "--from", own_redis_server.url)
    assert code == 0 and said.startswith("one.") and said.endswith("1 rows\n")
    code, said = warmpath("collect", into, "--from", own_redis_server.url, "--json")
    assert code == 0 and list(json.loads(said).values()) == [0]
    code, said = warmpath("verify", "--ledger", into)
    assert code == 0 and said.startswith("1 rows verified")
    code, said = warmpath("receipts", "--ledger", into, "--json")
    assert [row["call_id"] for row in json.loads(said)] == ["req_1"]


def test_missing_settings_are_reported(tmp_path: Path) -> None:
    code, said = warmpath("collect", str(tmp_path))
    assert code == 2 and "WARMPATH_LEDGER_SHIP" in said
    code, said = warmpath("collect", str(tmp_path), "--from", f"unix://{tmp_path}/nobody.sock")
    assert code == 1 and "cannot collect the rows" in said
    code, said = warmpath("collect", str(tmp_path), "--from", "http://x")
    assert code == 2 and "WARMPATH_LEDGER_SHIP" in said
