"""Billing: token metering, prices and receipts, open calls, crash recovery, drift from the engines' counts, the ledger.

This package may import `routing`, `limits`, `deployments`, `auth`, `providers` and what is below them. Read
`metering.py` first, then `receipts.py` and `ledger/rows.py`.
"""
