"""Billing: token metering, prices and receipts, open calls, crash recovery, drift against the engines, the ledger.

It may import `routing`, `limits`, `deployments`, `auth`, `providers` and what is below them. Begin at `metering.py`,
then `receipts.py`, then `ledger/rows.py`.
"""
