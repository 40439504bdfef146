"""The ledger: an append-only log of receipts, chained by hashes. No row is ever changed.

It imports only `types` and `core`. Begin at `rows.py`, the kinds of rows, and `chain.py`, their form and their
proof. Then read `writer.py`, which the gateway runs, and `reader.py`, which sums rows up. The reader imports DuckDB, so
import it from its module; this package does not.
"""

from gateway.billing.ledger.chain import BrokenRow, Verification, verify
from gateway.billing.ledger.rows import Correction, OpenCall, UnbilledWork
from gateway.billing.ledger.writer import Ledger

__all__ = ["BrokenRow", "Correction", "Ledger", "OpenCall", "UnbilledWork", "Verification", "verify"]
