"""`warmpath usage collect`: collects the shipped ledger rows of several gateways in one folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import redis
import typer

from gateway.billing.ledger.collector import CollectionGap
from gateway.billing.ledger.collector import collect as collect_rows
from gateway.cli.common import MISUSE, AsJson, fail, print_json, print_line, settings_or_exit


def collect(
    into: Annotated[
        Path, typer.Argument(metavar="DIR", help="Folder of the collected ledger, which grows with each run.")
    ],
    source: Annotated[
        str | None,
        typer.Option("--from", metavar="URL", help="Redis with the shipped rows. Default: WARMPATH_LEDGER_SHIP."),
    ] = None,
    keep: Annotated[bool, typer.Option("--keep", help="Leave the rows in Redis, for other collectors.")] = False,
    as_json: AsJson = False,
) -> None:
    """Collect the rows that gateways shipped to Redis. Collects each row exactly once (WARMPATH_LEDGER_SHIP).

    The result is a normal ledger: use `--ledger DIR` to read and verify it. Only one process can collect into a folder
    at a time.
    """
    url = settings_or_exit(ledger_ship=source).ledger_ship
    if url is None:
        fail("no source: set --from or WARMPATH_LEDGER_SHIP to the Redis to which gateways ship", code=MISUSE)
    try:
        taken = collect_rows(url, into, keep=keep)
    except CollectionGap as error:
        fail(str(error))
    except (redis.RedisError, OSError) as error:
        fail(f"cannot collect the rows: {error}")
    if as_json:
        print_json(taken)
        return
    for chain, rows in taken.items():
        print_line(f"{chain}  {rows} rows")
