"""What every package may use: errors, ids, money, times, timers, API keys, deadlines, cache breakpoints.

It imports nothing else of the gateway. Begin at `errors.py`, the tree of every way in which a request can fail.
"""
