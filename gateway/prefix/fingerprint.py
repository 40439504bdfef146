"""Fingerprints: a prompt's prefixes as short integers, without a tokenizer.

The prompt's text, in the order in which a chat template lays it out, is cut into blocks of `BLOCK_BYTES`; each
block's hash is seeded with the one before it, so that equal hashes at position i mean equal text up to there. Text
blocks name the same prefixes as token blocks would, for a hundredth of the cost (microseconds per thousand tokens).
A trailing part of a block has no hash: engines keep full blocks only.

A conversation's prompt begins with the one before it. Of long ones, where it ended and its chain are remembered, so
that a turn costs one pass over what is old, at the speed of memory, and blocks only for what is new.

The seed is derived from the tenant, so that one tenant's fingerprints say nothing about another's.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from functools import lru_cache

import xxhash

BLOCK_BYTES = 256
BYTES_PER_TOKEN = 4  # a rule of thumb for English and code; the truth comes back with every reply
BLOCK_TOKENS = BLOCK_BYTES // BYTES_PER_TOKEN
REMEMBERED_MIN_BYTES = 64 * 1024  # shorter prompts are hashed as fast as they are looked up
REMEMBERED_BLOCKS_MAX = 1 << 18  # of all prompts: 64 MiB of text, and some 10 MiB of memory
TURN_PIECES_MAX = 32  # that a turn adds to its conversation; after more, all is hashed again


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
    return _continued((), b"".join(pieces), seed)


def _continued(chain: tuple[int, ...], text: bytes, seed: int) -> tuple[int, ...]:
    """The chain of a text of which the first blocks have this one."""
    longer = list(chain)
    if longer:
        seed = longer[-1]
    for start in range(len(longer) * BLOCK_BYTES, len(text) - BLOCK_BYTES + 1, BLOCK_BYTES):
        seed = xxhash.xxh3_64_intdigest(text[start : start + BLOCK_BYTES], seed)
        longer.append(seed)
    return tuple(longer)


class FingerprintCache:
    """As `fingerprint`, for conversations that come back longer. Owned by the event loop."""

    def __init__(self) -> None:
        self._chains: OrderedDict[int, tuple[int, ...]] = OrderedDict()  # by the seeded hash of all of a prompt's text
        self._blocks = 0

    def of(self, pieces: Sequence[bytes], seed: int) -> tuple[int, ...]:
        text = b"".join(pieces)
        if len(text) < REMEMBERED_MIN_BYTES:
            return _continued((), text, seed)
        recent = pieces[-TURN_PIECES_MAX:]
        before = memoryview(text)[: len(text) - sum(map(len, recent))]
        hashed = xxhash.xxh3_64(before, seed)
        ends = [hashed.intdigest()]
        for piece in recent:
            hashed.update(piece)
            ends.append(hashed.intdigest())
        known = next((end for end in reversed(ends) if end in self._chains), None)
        chain = _continued(() if known is None else self._chains[known], text, seed)
        self._remember(ends[-1], chain)
        return chain

    def _remember(self, end: int, chain: tuple[int, ...]) -> None:
        self._blocks += len(chain) - len(self._chains.pop(end, ()))
        self._chains[end] = chain
        while self._blocks > REMEMBERED_BLOCKS_MAX:
            self._blocks -= len(self._chains.popitem(last=False)[1])
