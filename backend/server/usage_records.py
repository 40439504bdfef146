"""Stores the token usage of recent requests by x-request-id, for GET /requests/{id}.

A gateway reads a request's usage here if it lost the connection before the response ended. A gateway that was killed
reads it after its restart. So records are stored for an hour, or until there are more than `RECORDS_MAX`. The id is a
secret of the caller: a record can be read only with it.
"""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass

RECORDS_MAX = 200_000  # about 60 MB; the oldest are evicted
RECORD_SECONDS = 3600.0


@dataclass(frozen=True, slots=True)
class TokenUsage:
    """Tokens of one request. `cached_tokens` are part of the prompt, `reasoning_tokens` part of the completion."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    reasoning_tokens: int = 0

    def __add__(self, other: TokenUsage) -> TokenUsage:
        return TokenUsage(
            self.prompt_tokens + other.prompt_tokens,
            self.completion_tokens + other.completion_tokens,
            self.cached_tokens + other.cached_tokens,
            self.reasoning_tokens + other.reasoning_tokens,
        )


NO_USAGE = TokenUsage(0, 0, 0)

# Reads the usage of a request that the engine still processes. Returns None until the request has finished.
UsageLookup = Callable[[], TokenUsage | None]


@dataclass(slots=True)
class _Record:
    usage: TokenUsage | UsageLookup
    expires_at: float


class UsageRecords:
    """Usage records of requests that have ended, successfully or not. A reused id has its latest request's record."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._records: OrderedDict[str, _Record] = OrderedDict()
        self._unresolved: deque[_Record] = deque()  # records that still contain a `UsageLookup`, oldest first

    def add(self, request_id: str, usage: TokenUsage | UsageLookup) -> None:
        """Adds a record. If the engine has not finished the request, `usage` is a function that reads the usage."""
        now = self._clock()
        record = self._records[request_id] = _Record(usage, now + RECORD_SECONDS)
        self._records.move_to_end(request_id)
        while len(self._records) > RECORDS_MAX or next(iter(self._records.values())).expires_at <= now:
            self._records.popitem(last=False)
        if not isinstance(usage, TokenUsage):
            self._unresolved.append(record)
        while self._unresolved and (_read(self._unresolved[0]) is not None or self._unresolved[0].expires_at <= now):
            self._unresolved.popleft()  # releases the request that the lookup refers to

    def get(self, request_id: str) -> TokenUsage | None:
        """Returns the usage of a request, or None if the id is unknown or expired, or the request is not finished."""
        record = self._records.get(request_id)
        return None if record is None or record.expires_at <= self._clock() else _read(record)


def _read(record: _Record) -> TokenUsage | None:
    if isinstance(record.usage, TokenUsage):
        return record.usage
    usage = record.usage()
    if usage is not None:
        record.usage = usage
    return usage
