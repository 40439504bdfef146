"""Lamping and Veach, "A Fast, Minimal Memory, Consistent Hash Algorithm" (2014)."""

from __future__ import annotations


def jump_hash(key: int, buckets: int) -> int:
    """A bucket for a key of 64 bits. A new last bucket takes only its share of the keys; no other key moves.

    Takes ln(buckets) steps.
    """
    bucket, following = 0, 0
    while following < buckets:
        bucket = following
        key = (key * 2_862_933_555_777_941_757 + 1) & (2**64 - 1)
        following = ((bucket + 1) << 31) // ((key >> 33) + 1)
    return bucket
