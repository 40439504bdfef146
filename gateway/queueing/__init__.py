"""Phase 5: whose turn it is. `queue` waits, `lines` decides, and knows no event loop."""

from gateway.queueing.queue import Queue

__all__ = ["Queue"]
