"""The billing benchmark: the ledger beside a scripted vendor's own bill. Run `python -m benchmarks.billing`."""
