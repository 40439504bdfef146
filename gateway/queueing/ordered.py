"""A list that stays sorted while entries come and go anywhere in it.

It is kept in pieces, so that putting in and taking out compare O(log n) entries and move at most `PIECE_MAX`. A heap
would be enough to serve from; but who gives way is the last one, and who stops waiting stands anywhere.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from itertools import chain
from typing import Any, Generic, TypeVar

E = TypeVar("E", bound=tuple[Any, ...])

PIECE_MAX = 512  # entries, beyond which a piece becomes two


class Ordered(Generic[E]):
    """No two entries are equal."""

    __slots__ = ("_length", "_pieces")

    def __init__(self) -> None:
        self._pieces: list[list[E]] = []  # none of them empty
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[E]:
        """In order. What changes meanwhile ends it."""
        return chain.from_iterable(self._pieces)

    @property
    def last(self) -> E:
        return self._pieces[-1][-1]

    def add(self, entry: E) -> None:
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
        """One that is there."""
        at = self._piece_of(entry)
        piece = self._pieces[at]
        del piece[bisect_left(piece, entry)]
        self._length -= 1
        if not piece:
            del self._pieces[at]

    def _piece_of(self, entry: E) -> int:
        """The first that does not end before it."""
        return bisect_left(self._pieces, entry, key=_end)


def _end(piece: list[E]) -> E:
    return piece[-1]
