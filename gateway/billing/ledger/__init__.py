"""The ledger: one row per call, written once, chained by hashes, never changed.

`writer` is what the gateway runs, `chain` what makes a row and checks one, `reader` sums them up. The reader brings
DuckDB with it, so it is imported by whoever reads and not from here.
"""

from gateway.billing.ledger.chain import BrokenRow, Verification, verify
from gateway.billing.ledger.rows import Correction, OpenCall, UnbilledWork
from gateway.billing.ledger.writer import Ledger

__all__ = ["BrokenRow", "Correction", "Ledger", "OpenCall", "UnbilledWork", "Verification", "verify"]
