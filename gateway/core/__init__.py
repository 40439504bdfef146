"""Base library for all other packages: errors, ids, money, times, timers, API keys, deadlines, cache breakpoints.

This package imports no other package of the gateway. Read `errors.py` first, which defines all errors.
"""
