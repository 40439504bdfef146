"""Simulator: replays traffic through the gateway's own router, queue and cache models, in virtual time.

`replay.py` is the event loop in virtual time: begin there. `traces.py`, `generate.py` and `workloads.py` provide
traffic, and `site.py` says what it is sent to. `simulated_engine.py` models the engines, with their cache in
`engine_cache.py` and the times of their steps in `engine_steps.py`; `engine_publisher.py` is what they report.
`baselines.py` has the strategies of other routers, `compare.py` replays one trace through several strategies, and
`suite.py` many workloads. `warmpath simulate` is its command.
"""
