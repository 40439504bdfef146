"""What recent requests have consumed, by their x-request-id: the word of the one who counted.

A gateway whose connection ended before the answer did asks here what the answer had come to (GET /requests/{id}).
The id is the caller's secret: whoever does not know it learns nothing.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

RECORDS_MAX = 10_000  # the oldest are forgotten


@dataclass(frozen=True, slots=True)
class Usage:
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


class Records:
    """Of requests that have ended, however they did. A repeated id has its latest request's record."""

    def __init__(self) -> None:
        self._usages: OrderedDict[str, Usage] = OrderedDict()

    def add(self, request_id: str, usage: Usage) -> None:
        self._usages[request_id] = usage
        self._usages.move_to_end(request_id)
        if len(self._usages) > RECORDS_MAX:
            self._usages.popitem(last=False)

    def get(self, request_id: str) -> Usage | None:
        return self._usages.get(request_id)
