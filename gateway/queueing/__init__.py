"""Phase 5: grants concurrency slots to calls, and queues calls while all slots of their model are taken.

This package may import `deployments`, `prefix` and what is below them. Read `queue.py` first, in which calls wait on
the event loop. `scheduler.py` orders the queued calls and needs no event loop. `fair_queue.py` is the queue of one
latency class.
"""

from gateway.queueing.queue import Queue

__all__ = ["Queue"]
