"""Sorted list: stays sorted while entries are added and removed anywhere in it.

The entries are stored in pieces. Adding or removing an entry compares O(log n) entries and moves at most `PIECE_MAX`
entries. A heap is not enough: besides the first entry, a full queue removes its last one, and a caller that stops
waiting removes any entry.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from itertools import chain
from typing import Any, Generic, TypeVar

E = TypeVar("E", bound=tuple[Any, ...])

PIECE_MAX = 512  # entries; a longer piece is split in two


class SortedList(Generic[E]):
    """A sorted list of tuples, no two of them equal."""

    __slots__ = ("_length", "_pieces")

    def __init__(self) -> None:
        self._pieces: list[list[E]] = []  # none of them empty
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[E]:
        """Iterate in order. The list must not be changed during the iteration."""
        return chain.from_iterable(self._pieces)

    @property
    def last(self) -> E:
        """The greatest entry. Raises `IndexError` if the list is empty."""
        return self._pieces[-1][-1]

    def add(self, entry: E) -> None:
        """Insert an entry. The entry must not be in the list already."""
        self._length += 1
        if not self._pieces:
            self._pieces.append([entry])
            return
        at = min(self._piece_of(entry), len(self._pieces) - 1)
        piece = self._pieces[at]
        insort(piece, entry)
        if len(piece) > PIECE_MAX:
            self._pieces[at : at + 1] = [piece[: PIECE_MAX // 2], piece[PIECE_MAX // 2 :]]

    def remove(self, entry: E) -> None:
        """Remove an entry. The entry must be in the list."""
        at = self._piece_of(entry)
        piece = self._pieces[at]
        del piece[bisect_left(piece, entry)]
        self._length -= 1
        if not piece:
            del self._pieces[at]

    def _piece_of(self, entry: E) -> int:
        """Return the index of the first piece whose last entry is not less than `entry`."""
        return bisect_left(self._pieces, entry, key=_end)


def _end(piece: list[E]) -> E:
    return piece[-1]
