"""State of every deployment: concurrency slots, circuit breaker, health checks, load reports, quarantine, replica sync.

It may import `providers`, `prefix`, `storage`, `policy`, `types` and `core`. Begin at `fleet.py`, then
read `state.py`.
"""
