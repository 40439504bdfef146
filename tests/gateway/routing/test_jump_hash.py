"""Keys are spread evenly, and few of them move."""

from __future__ import annotations

import random

from gateway.routing.jump_hash import jump_hash


def test_a_new_bucket_takes_its_share_and_no_other_key_moves() -> None:
    rng = random.Random(1)
    keys = [rng.getrandbits(64) for _ in range(4_000)]
    for buckets in (1, 2, 7, 40):
        before = [jump_hash(key, buckets) for key in keys]
        after = [jump_hash(key, buckets + 1) for key in keys]
        assert set(before) == set(range(buckets))
        moved = [new for old, new in zip(before, after, strict=True) if old != new]
        assert set(moved) == {buckets}
        assert 0.7 < len(moved) * (buckets + 1) / len(keys) < 1.3
