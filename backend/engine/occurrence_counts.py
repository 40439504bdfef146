"""How often each token has occurred, in contiguous arrays.

A long conversation has thousands of distinct tokens, and the sampler makes tensors of their counts in every step. It
must not visit them one by one, so ids and counts lie in arrays that numpy can read without a copy.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable


class OccurrenceCounts:
    """Token ids, each once and in the order of first occurrence, with their counts."""

    __slots__ = ("_indexes", "counts", "token_ids")

    def __init__(self, token_ids: Iterable[int] = ()) -> None:
        """`token_ids` are listed from the start, with a count of 0."""
        self._indexes = {token_id: index for index, token_id in enumerate(dict.fromkeys(token_ids))}
        self.token_ids = array("q", self._indexes)
        self.counts = array("f", bytes(4 * len(self._indexes)))  # exact up to 1 << 24

    def add(self, token_id: int) -> None:
        """Counts one more occurrence. Fails while a view of the arrays exists."""
        index = self._indexes.setdefault(token_id, len(self.counts))
        if index == len(self.counts):
            self.token_ids.append(token_id)
            self.counts.append(1.0)
        else:
            self.counts[index] += 1.0

    def copy(self) -> OccurrenceCounts:
        copied = OccurrenceCounts()
        copied._indexes, copied.token_ids, copied.counts = self._indexes.copy(), self.token_ids[:], self.counts[:]
        return copied

    def __len__(self) -> int:
        return len(self.counts)
