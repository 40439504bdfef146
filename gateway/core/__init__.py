"""Base library for all other packages: errors, ids, money, times, timers, API keys, deadlines, cache breakpoints.

It imports no other package of the gateway. Begin at `errors.py`, the tree of all errors.
"""
