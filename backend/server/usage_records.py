"""What recent requests have consumed, by their x-request-id: the word of the one who counted.

A gateway whose connection ended before the answer did asks here what the answer had come to (GET /requests/{id}); and
one that was killed asks when it has started again. So records are kept for an hour, unless there are more of them than
`RECORDS_MAX` in that time. The id is the caller's secret: whoever does not know it learns nothing.
"""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass

RECORDS_MAX = 200_000  # some 60 MB; the oldest are forgotten
RECORD_SECONDS = 3600.0


@dataclass(frozen=True, slots=True)
class TokenUsage:
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    reasoning_tokens: int = 0  # of the completion's


UsageLookup = Callable[[], TokenUsage | None]


@dataclass(slots=True)
class _Record:
    usage: TokenUsage | UsageLookup
    forget_at: float


class UsageRecords:
    """Of requests that have ended, however they did. A repeated id has its latest request's record."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._records: OrderedDict[str, _Record] = OrderedDict()
        self._unread: deque[_Record] = deque()  # those that hold a `Look`, oldest first

    def add(self, request_id: str, usage: TokenUsage | UsageLookup) -> None:
        """Where the engine still works on it: how to look what it has come to, which is None until it is over."""
        now = self._clock()
        record = self._records[request_id] = _Record(usage, now + RECORD_SECONDS)
        self._records.move_to_end(request_id)
        while len(self._records) > RECORDS_MAX or next(iter(self._records.values())).forget_at <= now:
            self._records.popitem(last=False)
        if not isinstance(usage, TokenUsage):
            self._unread.append(record)
        while self._unread and (_read(self._unread[0]) is not None or self._unread[0].forget_at <= now):
            self._unread.popleft()  # a request is not held for longer than need be

    def get(self, request_id: str) -> TokenUsage | None:
        record = self._records.get(request_id)
        return None if record is None or record.forget_at <= self._clock() else _read(record)


def _read(record: _Record) -> TokenUsage | None:
    if isinstance(record.usage, TokenUsage):
        return record.usage
    usage = record.usage()
    if usage is not None:
        record.usage = usage
    return usage
