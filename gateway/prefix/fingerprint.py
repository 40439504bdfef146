"""Fingerprints: a prompt's prefixes as short integers, without a tokenizer.

The prompt's text, in the order in which a chat template lays it out, is cut into blocks of `BLOCK_BYTES`; each
block's hash is seeded with the one before it, so that equal hashes at position i mean equal text up to there. Text
blocks name the same prefixes as token blocks would, for a hundredth of the cost (microseconds per thousand tokens).
A trailing part of a block has no hash: engines keep full blocks only.

The seed is derived from the tenant, so that one tenant's fingerprints say nothing about another's.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache

import xxhash

BLOCK_BYTES = 256
BYTES_PER_TOKEN = 4  # a rule of thumb for English and code; the truth comes back with every reply
BLOCK_TOKENS = BLOCK_BYTES // BYTES_PER_TOKEN


@lru_cache(maxsize=10_000)
def seed_of(salt: str) -> int:
    """The chain's first seed, for a tenant's salt."""
    return xxhash.xxh3_64_intdigest(salt.encode())


def text_bytes_of(chain: Sequence[int], estimated_tokens: int) -> int:
    """How long a prompt's text was, about: its last block may have begun, and has no hash yet."""
    whole = len(chain) * BLOCK_BYTES
    return min(max(whole, estimated_tokens * BYTES_PER_TOKEN), whole + BLOCK_BYTES - 1)


def fingerprint(pieces: Iterable[bytes], seed: int) -> tuple[int, ...]:
    """Chained xxh3-64 of each full block of the pieces' concatenation."""
    text = b"".join(pieces)
    chain: list[int] = []
    for start in range(0, len(text) - BLOCK_BYTES + 1, BLOCK_BYTES):
        seed = xxhash.xxh3_64_intdigest(text[start : start + BLOCK_BYTES], seed)
        chain.append(seed)
    return tuple(chain)
