"""How often tokens have come, as numbers that lie one behind the other: a long conversation has thousands of them, and
whoever makes tensors of them in every step must not look at each."""

from __future__ import annotations

from array import array
from collections.abc import Iterable


class OccurrenceCounts:
    """Each token once, in the order in which they were met."""

    __slots__ = ("_places", "counts", "token_ids")

    def __init__(self, met: Iterable[int] = ()) -> None:
        """With tokens that have not come yet, and still are to be listed."""
        self._places = {token_id: place for place, token_id in enumerate(dict.fromkeys(met))}
        self.token_ids = array("q", self._places)
        self.counts = array("f", bytes(4 * len(self._places)))  # exact up to 1 << 24

    def add(self, token_id: int) -> None:
        """Comes once more. Fails while a view of the arrays is held."""
        place = self._places.setdefault(token_id, len(self.counts))
        if place == len(self.counts):
            self.token_ids.append(token_id)
            self.counts.append(1.0)
        else:
            self.counts[place] += 1.0

    def copy(self) -> OccurrenceCounts:
        copied = OccurrenceCounts()
        copied._places, copied.token_ids, copied.counts = self._places.copy(), self.token_ids[:], self.counts[:]
        return copied

    def __len__(self) -> int:
        return len(self.counts)
