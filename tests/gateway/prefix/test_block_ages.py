"""Reuse distances against a plain list of uses."""

from __future__ import annotations

import random

from gateway.prefix.block_ages import EPOCHS_MAX, BlockAges


def test_newer_blocks_are_counted_to_a_part_in_the_epochs() -> None:
    rng, ages, used = random.Random(1), BlockAges(), dict[int, int]()
    for clock in range(1, 20 * EPOCHS_MAX):
        if used and rng.random() < 0.5:  # used again
            before = rng.choice(list(used)[-200:])
            blocks = used.pop(before)
            ages.change(before, -blocks)
        else:
            blocks = rng.randint(1, 40)
        ages.change(clock, blocks)
        used[clock] = blocks
    assert len(ages._blocks) <= EPOCHS_MAX
    for clock in list(used)[:: len(used) // 50]:
        exact = sum(blocks for other, blocks in used.items() if other > clock)
        assert abs(ages.newer_blocks(clock) - exact) <= 2 * sum(used.values()) / EPOCHS_MAX * 4
    ages.clear()
    assert ages.newer_blocks(clock) == 0
