"""KV events on real sockets: wire format, replay, and agreement with the block pool."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2
import msgspec
import pytest
import zmq

from backend.engine.block_pool import BlockPool
from backend.engine.cached_block import ROOT_HASH, CachedBlock, hash_block
from backend.server import kv_events
from backend.server.kv_events import KVEventPublisher
from tests.backend.server.conftest import StartServer

pytestmark = pytest.mark.slow

WAIT_MS = 10_000
BLOCK = 2


def chain(*blocks: tuple[int, ...], salt: str = "", session: str = "") -> list[CachedBlock]:
    made: list[CachedBlock] = []
    for i, token_ids in enumerate(blocks):
        parent = made[-1].block_hash if made else ROOT_HASH
        own_salt = "" if i else salt
        made.append(CachedBlock(hash_block(parent, token_ids, own_salt), parent, token_ids, own_salt, session))
    return made


def wire(*blocks: CachedBlock) -> list[int]:
    """vLLM's integer hashes: the low 64 bits."""
    return [int.from_bytes(block.block_hash[-8:], "big") for block in blocks]


@contextmanager
def connected(kind: int, endpoint: str) -> Iterator[zmq.Socket[bytes]]:
    with zmq.Context() as context, context.socket(kind) as socket:
        socket.linger = 0
        socket.rcvtimeo = WAIT_MS
        if kind == zmq.SUB:
            socket.subscribe(b"")
        socket.connect(endpoint)
        yield socket


def replay(endpoint: str, first: int = 0) -> list[tuple[bytes, int, Any]]:
    """Requests a replay. Returns topic, number and content of all batches from `first`."""
    batches: list[tuple[bytes, int, Any]] = []
    with connected(zmq.DEALER, endpoint) as socket:
        socket.send_multipart([b"", first.to_bytes(8, "big")])
        while True:
            empty, topic, number, payload = socket.recv_multipart()
            assert empty == b""
            if int.from_bytes(number, "big", signed=True) == -1:
                assert (topic, payload) == (b"", b"")
                return batches
            batches.append((topic, int.from_bytes(number, "big"), msgspec.msgpack.decode(payload)))


@pytest.fixture
def publisher() -> Iterator[KVEventPublisher]:
    made = KVEventPublisher("tcp://127.0.0.1:*", "tcp://127.0.0.1:*", topic="kv@here")
    yield made
    made.close()


def events_of(publisher: KVEventPublisher) -> list[object]:
    assert publisher.replay_endpoint is not None
    return [event for *_, (_, events, _) in replay(publisher.replay_endpoint) for event in events]


def test_a_batch_has_vllms_three_frames(publisher: KVEventPublisher) -> None:
    blocks = chain((1, 2), (3, 4), (5, 6), salt="tenant", session="call-1")
    with connected(zmq.SUB, publisher.endpoint) as subscriber:
        subscriber.rcvtimeo = 20
        frames: list[bytes] = []
        for _ in range(WAIT_MS // 20):  # until the subscription has arrived
            publisher.stored(blocks[0])
            publisher.stored(blocks[1])
            publisher.removed(blocks[2].block_hash)
            publisher.cleared()
            publisher.end_step()
            try:
                frames = subscriber.recv_multipart()
                break
            except zmq.Again:
                continue
    topic, number, payload = frames
    assert (topic, len(number)) == (b"kv@here", 8)
    moment, events, rank = msgspec.msgpack.decode(payload)
    assert abs(moment - time.time()) < 60
    assert rank == 0
    assert events == [
        {
            "type": "BlockStored",
            "block_hashes": wire(*blocks[:2]),
            "parent_block_hash": None,
            "token_ids": [1, 2, 3, 4],
            "block_size": BLOCK,
            "lora_id": None,
            "medium": "GPU",
            "lora_name": None,
            "extra_keys": [["tenant"], None],
            "session_id": "call-1",
        },
        {"type": "BlockRemoved", "block_hashes": wire(blocks[2]), "medium": "GPU"},
        {"type": "AllBlocksCleared"},
    ]


def test_blocks_with_images_name_them(publisher: KVEventPublisher) -> None:
    """As in vLLM. Earlier blocks of the chain have none."""
    first, second, third = chain((1, 2), (3, 3), (3, 4))
    for block in (first, replace(second, images=("aa", "bb")), third):
        publisher.stored(block)
    publisher.end_step()
    (stored,) = events_of(publisher)
    assert isinstance(stored, dict)
    assert stored["extra_keys"] == [None, ["aa", "bb"], None]
    assert stored["block_hashes"] == wire(first, second, third)


def test_the_array_encoding_from_before_june_2026() -> None:
    publisher = KVEventPublisher("tcp://127.0.0.1:*", "tcp://127.0.0.1:*", encoding="array")
    blocks = chain((1, 2), (3, 4))
    for block in blocks:
        publisher.stored(block)
    publisher.removed(blocks[1].block_hash)
    publisher.cleared()
    publisher.end_step()
    stored, removed, cleared = events_of(publisher)
    assert stored[:8] == ["BlockStored", wire(*blocks), None, [1, 2, 3, 4], BLOCK, None, "GPU", None]  # type: ignore[index]
    assert (removed, cleared) == (["BlockRemoved", wire(blocks[1]), "GPU"], ["AllBlocksCleared"])
    publisher.close()


def test_only_a_chain_of_blocks_of_one_session_is_one_event(publisher: KVEventPublisher) -> None:
    ours, others = chain((1, 2), (3, 4), session="a"), chain((5, 6), (7, 8), session="b")
    continued = CachedBlock(others[1].block_hash, ours[1].block_hash, (7, 8), "", "b")
    for block in (*ours, others[0], continued):
        publisher.stored(block)
    publisher.end_step()
    events = [(e["session_id"], e["block_hashes"], e["parent_block_hash"]) for e in events_of(publisher)]  # type: ignore[index]
    assert events == [
        ("a", wire(*ours), None),
        ("b", wire(others[0]), None),
        ("b", wire(continued), wire(ours[1])[0]),
    ]


def test_a_step_that_changed_nothing_sends_nothing(publisher: KVEventPublisher) -> None:
    publisher.end_step()
    assert events_of(publisher) == []


def test_a_replay_starts_at_the_requested_number_and_ends_with_minus_one(publisher: KVEventPublisher) -> None:
    for block in chain((1, 2), (3, 4), (5, 6)):
        publisher.stored(block)
        publisher.end_step()
    assert publisher.replay_endpoint is not None
    assert [number for _, number, _ in replay(publisher.replay_endpoint, 1)] == [1, 2]
    assert replay(publisher.replay_endpoint, 3) == []


def test_a_malformed_replay_request_is_ignored(publisher: KVEventPublisher) -> None:
    publisher.cleared()
    publisher.end_step()
    assert publisher.replay_endpoint is not None
    with connected(zmq.DEALER, publisher.replay_endpoint) as socket:
        socket.send_multipart([b"", b"short"])
        socket.send(b"not even two frames")
    assert len(replay(publisher.replay_endpoint)) == 1


def test_old_batches_are_dropped_from_the_replay_buffer(
    publisher: KVEventPublisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_events, "REPLAY_BATCHES_MAX", 2)
    small = KVEventPublisher("tcp://127.0.0.1:*", "tcp://127.0.0.1:*")
    for block in chain((1, 2), (3, 4), (5, 6)):
        small.stored(block)
        small.end_step()
    assert small.replay_endpoint is not None
    assert [number for _, number, _ in replay(small.replay_endpoint)] == [1, 2]
    small.close()


def test_events_reproduce_the_content_of_the_pool(publisher: KVEventPublisher) -> None:
    pool = BlockPool(4, BLOCK, publisher)
    for i in range(6):
        blocks = chain((i, 1), (i, 2))
        table = pool.allocate(2)
        assert table is not None
        for block, content in zip(table, blocks, strict=True):
            pool.cache_block(block, content)
        pool.free(table)
        pool.end_step()
    held: set[int] = set()
    for event in events_of(publisher):
        change = held.update if event["type"] == "BlockStored" else held.difference_update  # type: ignore[index]
        change(event["block_hashes"])  # type: ignore[index]
    known = [chain((i, 1), (i, 2)) for i in range(6)]
    assert held == {
        hash
        for blocks in known
        for hash in wire(*blocks[: len(pool.find_cached_prefix([b.block_hash for b in blocks]))])
    }
    assert len(held) == pool.num_cached == 4


def test_the_engine_publishes_the_tokens_that_it_computed(start_server: StartServer, tmp_path: Path) -> None:
    endpoint, replay_endpoint = f"ipc://{tmp_path}/kv", f"ipc://{tmp_path}/replay"
    options = ["--kv-events", endpoint, "--kv-events-replay", replay_endpoint, "--block-size", "4"]
    with start_server(*options) as server:
        ask = {"model": server.model, "prompt": list(range(10, 30)), "max_tokens": 5, "cache_salt": "s"}
        ask |= {"temperature": 0, "ignore_eos": True}
        headers = {"x-session-id": "conversation-1"}
        httpx2.post(f"{server.base_url}/completions", json=ask, headers=headers).raise_for_status()
        stored = [event for *_, (_, events, _) in replay(replay_endpoint) for event in events]
    assert {event["type"] for event in stored} == {"BlockStored"}
    assert {event["session_id"] for event in stored} == {"conversation-1"}
    assert stored[0]["extra_keys"][0] == ["s"]
    tokens = [token for event in stored for token in event["token_ids"]]
    assert tokens[:20] == list(range(10, 30))
    assert len(tokens) == 24  # the last token is sampled, and never computed
    hashes = [hash for event in stored for hash in event["block_hashes"]]
    assert [event["parent_block_hash"] for event in stored[1:]] == [
        hashes[sum(len(e["block_hashes"]) for e in stored[:i]) - 1] for i in range(1, len(stored))
    ]


def test_an_unusable_address_prevents_the_start(start_server: StartServer, tmp_path: Path) -> None:
    with (
        pytest.raises(AssertionError, match="cannot publish KV events on tcp://nowhere"),
        start_server("--kv-events", "tcp://nowhere.invalid:1"),
    ):
        pass
