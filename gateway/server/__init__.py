"""The process: composition root, listener, HTTP/1.1 protocol, worker processes, probes and gauges.

Only `gateway.cli` stands above it, so it may import everything else. Begin at `app.py`, which builds the components.
"""
