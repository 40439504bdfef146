"""The ledger: an append-only log of receipts, chained by hashes. No row is ever changed.

This package imports only `types` and `core`. Read `rows.py` first, which defines the kinds of rows, and `chain.py`,
which defines their format and hashes. Then read `writer.py`, which the gateway runs, and `reader.py`, which sums rows.
The reader imports DuckDB, so this `__init__` does not export it: import it from its module.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from gateway.billing.ledger.chain import BrokenRow, Verification, verify
from gateway.billing.ledger.rows import Correction, OpenCall, UnbilledWork
from gateway.billing.ledger.writer import Ledger

if TYPE_CHECKING:
    from gateway.billing.ledger.shipper import Shipper


def make_shipper(url: str, ledger: Ledger, replica: str) -> Shipper:
    """Create what ships a ledger to Redis. Imports the client of Redis only now: its modules take 23 MiB."""
    shipper: Shipper = import_module("gateway.billing.ledger.shipper").Shipper(url, ledger, replica)
    return shipper


__all__ = ["BrokenRow", "Correction", "Ledger", "OpenCall", "UnbilledWork", "Verification", "make_shipper", "verify"]
