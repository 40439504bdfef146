"""`SortedList` against a plain sorted list, and the bound on what an operation moves."""

from __future__ import annotations

import random

from gateway.queueing.sorted_list import PIECE_MAX, SortedList


def test_it_equals_a_sorted_list() -> None:
    chance, ordered, plain = random.Random(7), SortedList[tuple[float, int]](), list[tuple[float, int]]()
    for number in range(6 * PIECE_MAX):
        entry = (chance.choice([chance.random(), 0.5]), number)
        ordered.add(entry)
        plain.append(entry)
        if chance.random() < 0.3:
            leaving = chance.choice(plain)
            ordered.remove(leaving)
            plain.remove(leaving)
    assert list(ordered) == sorted(plain) and len(ordered) == len(plain) and ordered.last == max(plain)
    for entry in sorted(plain):
        assert next(iter(ordered)) == entry
        ordered.remove(entry)
    assert not ordered and list(ordered) == []


def test_pieces_stay_within_their_bound() -> None:
    ordered = SortedList[tuple[int]]()
    for number in range(20 * PIECE_MAX):
        ordered.add((number,))
    assert max(map(len, ordered._pieces)) <= PIECE_MAX
    assert len(ordered._pieces) < 50
