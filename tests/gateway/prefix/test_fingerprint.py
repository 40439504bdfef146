"""Fingerprints of prompts, remembered chains, and leading matches in a cache model."""

from __future__ import annotations

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from gateway.prefix import fingerprint as fingerprints
from gateway.prefix.cache_model import CacheModel
from gateway.prefix.fingerprint import BLOCK_BYTES, BLOCK_TOKENS, FingerprintCache, fingerprint, seed_of

texts = st.binary(max_size=5 * BLOCK_BYTES)


@given(texts, texts)
def test_equal_hashes_mean_equal_text_up_to_there(one: bytes, other: bytes) -> None:
    for position, (a, b) in enumerate(zip(fingerprint([one], 1), fingerprint([other], 1), strict=False), start=1):
        end = position * BLOCK_BYTES
        assert (a == b) == (one[:end] == other[:end])


@given(st.lists(texts, max_size=6))
def test_the_pieces_of_the_text_do_not_matter(pieces: list[bytes]) -> None:
    whole = b"".join(pieces)
    assert fingerprint(pieces, 7) == fingerprint([whole], 7)
    assert len(fingerprint(pieces, 7)) == len(whole) // BLOCK_BYTES


turns = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3), st.lists(texts, min_size=1, max_size=4)), max_size=12)


@given(turns)
def test_remembered_chains_equal_computed_ones(turns: list[tuple[int, int, list[bytes]]]) -> None:
    """Longer, shorter, edited, or another tenant's: the result equals that of a first computation."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fingerprints, "REMEMBERED_MIN_BYTES", BLOCK_BYTES)
        patch.setattr(fingerprints, "TURN_PIECES_MAX", 3)
        patch.setattr(fingerprints, "REMEMBERED_BLOCKS_MAX", 20)
        remembering = FingerprintCache()
        conversations: dict[int, list[bytes]] = {number: [b"system"] for number in range(3)}
        for number, forgotten, added in turns:
            said = conversations[number]
            conversations[number] = [*said[: len(said) - forgotten], *added]
            pieces = conversations[number]
            assert remembering.fingerprint(pieces, number % 2) == fingerprint(pieces, number % 2)


def test_only_the_new_part_of_a_turn_is_hashed_into_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[int] = []

    def digest(block: bytes, seed: int) -> int:
        hashed.append(len(block))
        return hash_of(block, seed)

    hash_of = xxhash.xxh3_64_intdigest
    monkeypatch.setattr(xxhash, "xxh3_64_intdigest", digest)
    remembering, said = FingerprintCache(), [b"a" * 100_000, b"b" * 100_000]
    remembering.fingerprint(said, 1)
    assert len(hashed) == 200_000 // BLOCK_BYTES
    hashed.clear()
    remembering.fingerprint([*said, b"c" * 1_000, b"d" * 1_000], 1)
    assert len(hashed) == 202_000 // BLOCK_BYTES - 200_000 // BLOCK_BYTES
    hashed.clear()
    remembering.fingerprint([*said, b"c" * 1_000, b"d" * 1_000], 2)
    assert len(hashed) == 202_000 // BLOCK_BYTES, "another tenant's"


def test_chains_of_different_salts_share_nothing() -> None:
    text = [b"x" * 10 * BLOCK_BYTES]
    assert not set(fingerprint(text, seed_of("one"))) & set(fingerprint(text, seed_of("other")))


def test_a_model_matches_leading_blocks_only() -> None:
    cache = CacheModel(10 * BLOCK_TOKENS)
    cache.add([1, 2, 3])
    assert cache.match([1, 2, 9]) == 2
    assert cache.match([9, 2, 3]) == 0
    assert cache.match([]) == 0


def test_the_oldest_is_evicted_first_and_a_tail_before_its_head() -> None:
    cache = CacheModel(4 * BLOCK_TOKENS)
    cache.add([1, 2, 3])
    cache.add([10, 11])
    assert cache.match([10, 11]) == 2
    assert cache.match([1, 2, 3]) == 2


@given(st.lists(st.lists(st.integers(0, 50), max_size=12, unique=True), max_size=30), st.integers(1, 20))
def test_a_model_is_bounded_and_holds_the_newest_chain(chains: list[list[int]], capacity: int) -> None:
    cache = CacheModel(capacity * BLOCK_TOKENS)
    for chain in chains:
        cache.add(chain)
        assert len(cache) <= capacity
        assert cache.match(chain) == min(len(chain), capacity)
