"""The deadlines of unfinished requests, in order."""

from __future__ import annotations

import math
from collections.abc import Collection
from heapq import heappop, heappush

from backend.engine.request import Request


class Deadlines:
    """A heap of deadlines. It may still contain requests that have ended; those are dropped when they come up."""

    def __init__(self, max_entries: int) -> None:
        """`max_entries`: a longer heap consists mostly of ended requests, and is rebuilt."""
        self._max_entries = max_entries
        self._heap: list[tuple[float, str]] = []

    def add(self, request: Request, unfinished: Collection[Request]) -> None:
        """`unfinished` includes the request itself."""
        if request.deadline == math.inf:
            return
        if len(self._heap) > self._max_entries:
            self._heap = sorted((r.deadline, r.request_id) for r in unfinished)
        else:
            heappush(self._heap, (request.deadline, request.request_id))

    def pop_until(self, now: float) -> list[tuple[float, str]]:
        """Removes and returns (deadline, request id) of every entry that is due at `now`, earliest first."""
        due = []
        while self._heap and self._heap[0][0] <= now:
            due.append(heappop(self._heap))
        return due

    def clear(self) -> None:
        self._heap = []
