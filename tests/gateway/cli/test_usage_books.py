"""`warmpath usage close`, `adjust` and `statement`."""

from __future__ import annotations

import csv
import json
from pathlib import Path

from tests.gateway.billing.ledger.receipts import a_receipt, write_chain
from tests.gateway.cli.conftest import Warmpath


def test_a_month_is_closed_and_its_statement_stays(warmpath: Warmpath, tmp_path: Path) -> None:
    moment = "2025-11-20T10:00:00.000000Z"
    write_chain(tmp_path / "replica", [a_receipt(started=moment, finished=moment, cost="5")])
    ledger = ("--ledger", str(tmp_path))
    credit = ("--reason", "outage", "--author", "ann", "--month", "2025-11")
    assert warmpath("usage", "adjust", "acme", "1.5", *credit, *ledger).exit_code == 0
    closed = warmpath("usage", "close", "2025-11", "--author", "ann", *ledger)
    assert closed.exit_code == 0 and "acme  3.5 USD" in closed.stdout and "2025-12" in closed.stdout
    assert "closed already" in warmpath("usage", "close", "2025-11", "--author", "ann", *ledger).stderr
    refused = warmpath("usage", "adjust", "acme", "1", *credit, *ledger)
    assert refused.exit_code == 1 and "is closed" in refused.stderr
    (statement,) = json.loads(warmpath("usage", "statement", "2025-11", "--json", *ledger).stdout)
    assert statement["total"] == {"USD": "3.5"} and statement["closed"]
    rows = [*csv.DictReader(warmpath("usage", "statement", "2025-11", "--csv", *ledger).stdout.splitlines())]
    shown = [(row["kind"], row["amount"], row["author"]) for row in rows]
    assert shown == [("usage", "5", ""), ("credit", "-1.5", "ann")]
    assert warmpath("usage", "adjust", "acme", "1.x", *credit, *ledger).exit_code == 2
