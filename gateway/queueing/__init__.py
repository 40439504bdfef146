"""Phase 5: grants concurrency slots to calls, and queues calls while all slots of their model are taken.

It may import `deployments`, `prefix` and what is below them. Begin at `queue.py`, which waits on the event loop. Then
read `scheduler.py`, which orders the waiting calls without one, and `fair_queue.py`, the queue of one class.
"""

from gateway.queueing.queue import Queue

__all__ = ["Queue"]
