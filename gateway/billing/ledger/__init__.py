"""The ledger: an append-only log of receipts, chained by hashes. No row is ever changed.

This package imports only `types` and `core`. Read `rows.py` first, which defines the kinds of rows, and `chain.py`,
which defines their format and hashes. Then read `writer.py`, which the gateway runs, and `reader.py`, which sums rows.
The reader imports DuckDB, so this `__init__` does not export it: import it from its module.
"""

from gateway.billing.ledger.chain import BrokenRow, Verification, verify
from gateway.billing.ledger.rows import Correction, OpenCall, UnbilledWork
from gateway.billing.ledger.writer import Ledger

__all__ = ["BrokenRow", "Correction", "Ledger", "OpenCall", "UnbilledWork", "Verification", "verify"]
