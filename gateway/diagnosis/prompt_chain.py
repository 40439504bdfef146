"""A prompt's chain: what the journal keeps of its text, so that cache hits can be predicted later.

As a fingerprint (`gateway/prefix/fingerprint.py`), a chain has hashes of which each stands for everything before it, so
equal hashes at one place mean equal prefixes, and no text can be read from them. To be small, it is coarser than a
fingerprint where the prompt is long: one hash for every unit of 16 tokens in the first 64 units, and then 32 hashes for
each doubling of the length. A prompt of 8k tokens has 160 hashes, one of 128k tokens 288. Where two prompts part is
known to 1/32 of the length, always rounded down. Hashes have 24 bits: a wrong match needs two equal ones at one place,
and is at most one hash long.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterator, Sequence
from itertools import islice

import xxhash

from gateway.diagnosis.outline import PromptPart
from gateway.prefix.fingerprint import BYTES_PER_TOKEN

UNIT_TOKENS = 16  # a block of most engines
UNIT_BYTES = UNIT_TOKENS * BYTES_PER_TOKEN
FINE_UNITS = 64  # with a hash each, from the beginning
HASHES_PER_DOUBLING_BITS = 5
HASH_BYTES = 3
MAX_UNITS = 1 << 16  # a million tokens; what is longer is cut
UNIT_BITS = 8 * HASH_BYTES + 16  # of a number that `units_of` returns


def chain_of(parts: Sequence[PromptPart], seed: int) -> str:
    """The chain of a prompt, as base64. `seed` is derived from the tenant's salt."""
    texts = (text for part in parts for text in (part.role, part.text, part.reasoning, part.rest))
    prompt = "\0".join(texts).encode("utf-8", "surrogatepass")
    hashes = bytearray()
    for start, end in _steps(min(len(prompt) // UNIT_BYTES, MAX_UNITS)):
        seed = xxhash.xxh3_64_intdigest(prompt[start * UNIT_BYTES : end * UNIT_BYTES], seed)
        hashes += (seed & 0xFFFFFF).to_bytes(HASH_BYTES, "big")
    return base64.b64encode(hashes).decode()


def units_of(chain: str) -> list[int]:
    """The chain with one number for each unit, as a cache model takes it. Empty for text that is no chain."""
    try:
        hashes = base64.b64decode(chain, validate=True)
    except binascii.Error:
        return []
    units: list[int] = []
    steps = _steps(MAX_UNITS)
    for at in range(0, len(hashes) - HASH_BYTES + 1, HASH_BYTES):
        start, end = next(steps, (0, 0))
        first = int.from_bytes(hashes[at : at + HASH_BYTES], "big") << (UNIT_BITS - 8 * HASH_BYTES)
        units.extend(range(first, first + end - start))
    return units


def unit_count(chain: str) -> int:
    """The length of `units_of`, or a little more."""
    count = len(chain) // 4 * 3 // HASH_BYTES
    return count if count <= FINE_UNITS else next(islice(_steps(MAX_UNITS), count - 1, None), (0, MAX_UNITS))[1]


def _steps(units: int) -> Iterator[tuple[int, int]]:
    """The units that each hash stands for, [start, end), up to `units`."""
    start = 0
    while True:
        end = start + (1 if start < FINE_UNITS else 1 << (start.bit_length() - 1 - HASHES_PER_DOUBLING_BITS))
        if end > units:
            return
        yield start, end
        start = end
