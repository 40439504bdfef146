"""Fingerprints: one chained hash per block of a prompt's text, so that prefixes can be compared without a tokenizer.

The prompt's text, in the order in which a chat template lays it out, is cut into blocks of `BLOCK_BYTES`. Each block's
hash is seeded with the previous one. So equal hashes at position i mean equal text up to there. Text blocks identify
the same prefixes as token blocks, at a hundredth of the cost: microseconds per thousand tokens. An incomplete last
block has no hash, because engines cache full blocks only.

A conversation's prompt begins with the previous one. For long prompts, the hash of the whole text and its chain are
remembered (`FingerprintCache`). So a turn costs one pass over the old text at the speed of memory, and block hashes
only for the new text.

The seed is derived from the tenant's salt, so one tenant's fingerprints say nothing about another's.
"""

from __future__ import annotations

import struct
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from functools import lru_cache

import xxhash

BLOCK_BYTES = 256
BYTES_PER_TOKEN = 4  # a rule of thumb for English and code; responses report the true counts
BLOCK_TOKENS = BLOCK_BYTES // BYTES_PER_TOKEN
REMEMBERED_MIN_BYTES = 64 * 1024  # of a prompt; hashing shorter ones is as fast as a lookup
REMEMBERED_BLOCKS_MAX = 1 << 18  # of all prompts: 64 MiB of text, about 10 MiB of memory
TURN_PIECES_MAX = 32  # added by one turn; if there are more, the whole prompt is hashed again

_blocks_of = struct.Struct(f"{BLOCK_BYTES}s").iter_unpack


@lru_cache(maxsize=10_000)
def seed_of(salt: str) -> int:
    """The first seed of a tenant's chains."""
    return xxhash.xxh3_64_intdigest(salt.encode())


def text_bytes_of(chain: Sequence[int], estimated_tokens: int) -> int:
    """The approximate length of a prompt's text. An incomplete last block has no hash but belongs to the text."""
    whole = len(chain) * BLOCK_BYTES
    return min(max(whole, estimated_tokens * BYTES_PER_TOKEN), whole + BLOCK_BYTES - 1)


def fingerprint(pieces: Iterable[bytes], seed: int) -> tuple[int, ...]:
    """The chained xxh3-64 of each full block of the pieces' concatenation."""
    return _extend((), b"".join(pieces), seed)


def _extend(chain: tuple[int, ...], text: bytes | memoryview, seed: int) -> tuple[int, ...]:
    """The chain of a text whose first blocks have the given chain."""
    extended, digest = [*chain], xxhash.xxh3_64_intdigest
    if chain:
        seed = chain[-1]
    for (block,) in _blocks_of(text[len(chain) * BLOCK_BYTES : len(text) // BLOCK_BYTES * BLOCK_BYTES]):
        seed = digest(block, seed)
        extended.append(seed)
    return tuple(extended)


class FingerprintCache:
    """Computes fingerprints, and reuses the chains of long prompts that came before. Owned by the event loop."""

    def __init__(self) -> None:
        self._chains: OrderedDict[int, tuple[int, ...]] = OrderedDict()  # by the seeded hash of a prompt's whole text
        self._blocks = 0

    def fingerprint(self, pieces: Sequence[bytes], seed: int) -> tuple[int, ...]:
        """As the function `fingerprint`."""
        text = b"".join(pieces)
        if len(text) < REMEMBERED_MIN_BYTES:
            return _extend((), text, seed)
        recent = pieces[-TURN_PIECES_MAX:]
        view = memoryview(text)
        hashed = xxhash.xxh3_64(view[: len(text) - sum(map(len, recent))], seed)
        ends = [hashed.intdigest()]
        for piece in recent:
            hashed.update(piece)
            ends.append(hashed.intdigest())
        known_end = next((end for end in reversed(ends) if end in self._chains), None)
        chain = _extend(() if known_end is None else self._chains[known_end], view, seed)
        self._remember(ends[-1], chain)
        return chain

    def _remember(self, end: int, chain: tuple[int, ...]) -> None:
        self._blocks += len(chain) - len(self._chains.pop(end, ()))
        self._chains[end] = chain
        while self._blocks > REMEMBERED_BLOCKS_MAX:
            self._blocks -= len(self._chains.popitem(last=False)[1])
