"""Metering and billing: usage, receipts with prices, open calls, crash recovery, reconciliation, the ledger.

It may import `routing`, `limits`, `deployments`, `auth`, `providers` and what is below them. Begin at `metering.py`,
then `receipts.py`, then `ledger/rows.py`.
"""
