"""The gateway process: composition root, listener, HTTP/1.1 protocol, worker processes, probes and gauges.

This package may import every package except `gateway.cli`. Read `app.py` first, the ASGI application.
"""
