"""The learned capacity of a cache, from responses that agree, contradict each other, or come from equal deployments."""

from __future__ import annotations

import random

import pytest

from gateway.prefix.learned_capacity import CapacityGroup, LearnedCapacity, Part, Piece, is_cut, pieces_of

TRUE = 1_000


def respond(learned: LearnedCapacity, distance: int, *, wrong: bool = False) -> None:
    """A response on a prompt of 50 blocks with this reuse distance, at a cache of `TRUE` blocks."""
    is_cached = (distance < TRUE) is not wrong
    learned.note([(distance, 50)], 50 * is_cached, is_surprise=is_cached is not (distance < learned.blocks))


def pieces(*parts: Part) -> list[Piece]:
    return [(distance, length) for part in parts for distance, _, length in pieces_of(*part)]


@pytest.mark.parametrize("guess", [TRUE // 10, TRUE, 10 * TRUE])
@pytest.mark.parametrize("wrong_share", [0.0, 0.2])
def test_the_capacity_is_found_in_two_hundred_responses(guess: int, wrong_share: float) -> None:
    learned, rng = LearnedCapacity(guess), random.Random(1)
    for number in range(400):
        respond(learned, rng.randrange(2 * TRUE), wrong=rng.random() < wrong_share)
        if number >= 200:
            assert 0.7 * TRUE <= learned.blocks <= 1.4 * TRUE


def test_one_response_that_certainly_found_a_part_corrects_a_guess() -> None:
    """A restart loses everything, and only a cache that is too small loses the end."""
    part = (TRUE - 200, 400)
    for ends_guess in (True, False):
        learned = LearnedCapacity(100 * TRUE)
        learned.note(pieces(part), 200, is_surprise=True, ends_guess=ends_guess)
        assert (learned.blocks == pytest.approx(TRUE, rel=0.1)) == ends_guess
    assert is_cut([part], 200)
    assert not is_cut([part], 0) and not is_cut([part], 400)
    assert not is_cut([(10, 50), part], 50)


def test_what_several_prompts_found_together_is_what_was_used_last() -> None:
    """Two conversations that evict each other's ends: of both, the beginnings are cached."""
    learned = LearnedCapacity(100 * TRUE)
    parts = [(TRUE - 300, 600), (TRUE - 300, 600)]
    learned.note(pieces(*parts), 600, responses=2, is_surprise=True, ends_guess=True)
    assert learned.blocks == pytest.approx(TRUE, rel=0.15)


def test_a_few_responses_that_find_parts_show_a_capacity_far_below_the_guess() -> None:
    """Conversations that evict each other's ends: each response says where the cached part ends."""
    learned, rng = LearnedCapacity(100 * TRUE), random.Random(1)
    for _ in range(40):
        respond(learned, rng.randrange(TRUE // 2))
    for _ in range(8):
        distance = rng.randrange(TRUE - 300, TRUE - 100)
        learned.note(pieces((distance, 400)), TRUE - distance, is_surprise=True)
    assert learned.blocks == pytest.approx(TRUE, rel=0.15)


def test_single_responses_do_not_move_a_capacity_that_many_agree_on() -> None:
    learned, rng = LearnedCapacity(TRUE), random.Random(1)
    for _ in range(100):
        respond(learned, rng.randrange(2 * TRUE))
    before = learned.blocks
    for distance in (10, 20, 30):  # misses, as after a restart
        respond(learned, distance, wrong=True)
    assert learned.blocks == before


def test_equal_deployments_share_what_they_see() -> None:
    group, rng = CapacityGroup(), random.Random(1)
    one, other = LearnedCapacity(10 * TRUE), LearnedCapacity(10 * TRUE)
    one.group = other.group = group
    for _ in range(50):
        respond(one, rng.randrange(2 * TRUE))
    respond(other, TRUE + 100)
    assert other.blocks < 1.4 * TRUE
