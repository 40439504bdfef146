"""The batch encodings of the publishers' releases."""

from __future__ import annotations

import msgspec
import pytest

from gateway.prefix.events.base import BlocksRemoved, BlocksStored
from gateway.prefix.events.wire import CacheCleared, MalformedBatch, read_batch

packed = msgspec.msgpack.encode

STORED = {
    "type": "BlockStored",
    "block_hashes": [11, 12],
    "parent_block_hash": 10,
    "token_ids": [1, 2, 3, 4],
    "block_size": 2,
    "lora_id": None,
    "medium": "GPU",
    "lora_name": None,
    "extra_keys": [["salt", ["image", 3]], None],
    "session_id": "call-1",
    "something_newer": {"a": [1]},
}
REMOVED = {"type": "BlockRemoved", "block_hashes": [12], "medium": "GPU"}
CLEARED = {"type": "AllBlocksCleared"}
READ = [BlocksStored((11, 12), 10, 2, "call-1"), BlocksRemoved((12,)), CacheCleared()]


def test_maps_in_an_array_as_vllm_0_32_sends_them() -> None:
    batch = read_batch(packed([1700.5, [STORED, REMOVED, CLEARED], 0]))
    assert batch.at == 1700.5
    assert batch.events == READ


def test_a_batch_that_is_a_map_too() -> None:
    assert read_batch(packed({"ts": 1.0, "events": [STORED, REMOVED, CLEARED], "data_parallel_rank": 3})).events == READ


@pytest.mark.parametrize(
    "stored",
    [
        ["BlockStored", [11, 12], 10, [1, 2, 3, 4], 2],  # the oldest encoding
        ["BlockStored", [11, 12], 10, [1, 2, 3, 4], 2, None],
        ["BlockStored", [11, 12], 10, [1, 2, 3, 4], 2, 7, "GPU"],
        ["BlockStored", [11, 12], 10, [1, 2, 3, 4], 2, None, "GPU", {"cache_salt": "salt"}],  # SGLang's
        ["BlockStored", [11, 12], 10, [1, 2, 3, 4], 2, None, "GPU", None, [["salt"], None], 0, "full", None, None],
    ],
)
def test_arrays_as_they_were_until_june_2026(stored: list[object]) -> None:
    events = [stored, ["BlockRemoved", [12]], ["BlockRemoved", [13], "GPU"], ["AllBlocksCleared"]]
    assert read_batch(packed([1.0, events])).events == [
        BlocksStored((11, 12), 10, 2),
        BlocksRemoved((12,)),
        BlocksRemoved((13,)),
        CacheCleared(),
    ]


def test_maps_of_sglang() -> None:
    """Hashes may be negative. Further properties of a block have fields of their own."""
    stored = {
        "type": "BlockStored", "block_hashes": [-(2**63), 2**64 - 1], "parent_block_hash": None, "token_ids": [1, 2],
        "block_size": 1, "lora_id": None, "medium": "GPU", "metadata": {"cache_salt": "salt"},
    }  # fmt: skip
    batch = packed([1.0, [stored, {"type": "BlockRemoved", "block_hashes": [-(2**63)]}], None])
    assert read_batch(batch).events == [BlocksStored((-(2**63), 2**64 - 1), None, 1), BlocksRemoved((-(2**63),))]


def test_hashes_may_be_bytes() -> None:
    event = {**STORED, "block_hashes": [b"\x01" * 32], "parent_block_hash": b"\x02" * 32, "session_id": None}
    assert read_batch(packed([1.0, [event]])).events == [BlocksStored((b"\x01" * 32,), b"\x02" * 32, 2)]


@pytest.mark.parametrize("other", [{"medium": "CPU"}, {"medium": "STORAGE"}, {"group_idx": 1}])
def test_slower_tiers_and_other_cache_groups_are_ignored(other: dict[str, object]) -> None:
    events = [{**STORED, **other}, {**REMOVED, **other}]
    assert read_batch(packed([1.0, events])).events == []


def test_unknown_event_types_are_skipped() -> None:
    events = [{"type": "BlockPinned", "block_hashes": [1]}, REMOVED, ["BlockPinned", [1]]]
    assert read_batch(packed([1.0, events])).events == [BlocksRemoved((12,))]


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        packed(3),
        packed([1.0]),
        packed(["x", []]),
        packed([1.0, [3]]),
        packed([1.0, [{"block_hashes": [1]}]]),
        packed([1.0, [{"type": "BlockStored"}]]),
        packed([1.0, [{**STORED, "block_hashes": ["text"]}]]),
        packed([1.0, [["BlockRemoved"]]]),
        packed([1.0, [REMOVED]])[:-1],
    ],
)
def test_a_malformed_batch_is_refused_with_the_reason(payload: bytes) -> None:
    with pytest.raises(MalformedBatch):
        read_batch(payload)
