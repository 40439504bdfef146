"""Responses in the background (`background: true`): they run without their client, which asks for them later.

Begin at `service.py`. `run.py` runs one response, `events.py` numbers and stores its events, `follower.py` sends them
to clients, and `lease.py` shows other gateways that a run is alive. This package may import everything below
`gateway.server`, except for the packages beside it.
"""

from gateway.background.canonicaliser import BackgroundCanonicaliser
from gateway.background.events import events_space
from gateway.background.service import BackgroundService

__all__ = ["BackgroundCanonicaliser", "BackgroundService", "events_space"]
