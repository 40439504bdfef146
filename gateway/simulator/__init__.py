"""Simulator: replays traffic through the gateway's own router, queue and cache models, in virtual time.

`replay.py` is the event loop in virtual time: begin there. `traces.py` and `generate.py` provide traffic,
`simulated_engine.py` models the engines, `baselines.py` has the strategies of other routers, and `compare.py` replays
one trace through several strategies. `warmpath simulate` is its command.
"""
