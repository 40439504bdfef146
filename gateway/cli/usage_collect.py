"""`warmpath usage collect`: the ledgers of several gateways in one folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import redis
import typer

from gateway.billing.ledger.collector import CollectionGap
from gateway.billing.ledger.collector import collect as collect_rows
from gateway.cli.common import MISUSE, AsJson, fail, say, say_json, settings_or_exit


def collect(
    into: Annotated[Path, typer.Argument(metavar="DIR", help="Where to: a ledger, which grows with each run.")],
    source: Annotated[
        str | None, typer.Option("--from", metavar="URL", help="The Redis; left out: WARMPATH_LEDGER_SHIP.")
    ] = None,
    keep: Annotated[bool, typer.Option("--keep", help="Leave the rows in Redis, for others who collect.")] = False,
    as_json: AsJson = False,
) -> None:
    """Take the rows that gateways have shipped to Redis (WARMPATH_LEDGER_SHIP), each exactly once.

    What is collected is a ledger like any other: `--ledger DIR` reads and verifies it. One process collects into a
    folder at a time.
    """
    url = settings_or_exit(ledger_ship=source).ledger_ship
    if url is None:
        fail("from where? --from or WARMPATH_LEDGER_SHIP says which Redis the gateways ship to", code=MISUSE)
    try:
        taken = collect_rows(url, into, keep=keep)
    except CollectionGap as error:
        fail(str(error))
    except (redis.RedisError, OSError) as error:
        fail(f"the rows can not be collected: {error}")
    if as_json:
        say_json(taken)
        return
    for chain, rows in taken.items():
        say(f"{chain}  {rows} rows")
