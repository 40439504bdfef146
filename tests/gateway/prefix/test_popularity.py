"""Which beginnings of prompts are popular."""

from __future__ import annotations

import random

import pytest

from gateway.prefix.popularity import PREFIXES_MAX, Popularity

SYSTEM = tuple(range(48))


def test_a_common_beginning_is_found_with_its_share() -> None:
    popularity, rng = Popularity(), random.Random(1)
    for _ in range(1000):
        rest = tuple(rng.getrandbits(60) for _ in range(20))
        popularity.note_call((*SYSTEM, *rest) if rng.random() < 0.6 else rest)
    blocks, share = popularity.popular_blocks((*SYSTEM, 1, 2, 3), 0.25)
    assert blocks == 48
    assert share == pytest.approx(0.6, abs=0.1)
    assert popularity.popular_blocks((*SYSTEM, 1, 2, 3), 0.9) == (0, 0.0)


def test_a_conversation_is_not_popular_because_it_is_new() -> None:
    popularity = Popularity()
    popularity.note_call(SYSTEM)
    assert popularity.popular_blocks(SYSTEM, 0.25) == (0, 0.0)


def test_memory_is_bounded() -> None:
    popularity = Popularity()
    for number in range(PREFIXES_MAX + 100):
        popularity.note_call((number,))
    assert len(popularity._counts) == PREFIXES_MAX
