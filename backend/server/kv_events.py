"""Publishes changes of the prefix cache as KV events over ZeroMQ, in vLLM's format.

Every step that changed the cache publishes one batch on a PUB socket, as three frames:

    topic | sequence number, 8 bytes big-endian, from 0 | msgpack [time, [event, ...], data-parallel rank]

With `map` encoding, an event is a map with its type under the key "type" (vLLM since June 2026, SGLang 0.5.23). With
`array` encoding, it is an array of the type and the fields in order (earlier versions of both). Hashes are the low 64
bits of the engine's hashes; treat them as opaque ids. Events of stored blocks contain tokens and session ids, so the
address must stay private.

A PUB socket drops messages if a subscriber is too slow. A subscriber that finds a gap in the sequence numbers sends the
frames [empty, first missing number] to the replay socket, a ROUTER. The reply is [empty, topic, number, batch] for each
batch that is still buffered, and then the number -1. Source of the formats: vLLM 0.32,
`vllm/distributed/kv_events.py`.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import Literal

import msgspec
import zmq

from backend.engine.cached_block import ROOT_HASH, CachedBlock

Encoding = Literal["map", "array"]

REPLAY_BATCHES_MAX = 10_000  # batches buffered for replays to subscribers that missed some
SEND_QUEUE_MAX = 100_000  # batches queued for one subscriber; further ones are dropped
END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)
MEDIUM = "GPU"  # vLLM's name for the memory of the engine's own KV cache, on a CPU too

_HASH_MASK = (1 << 64) - 1


class BlockStored(msgspec.Struct, tag=True, omit_defaults=True):
    """KV event: the cache stored a chain of blocks, in which each block is the child of the block before it.

    `parent_block_hash` is None if the chain begins at the start of a prompt.
    """

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[str, ...] | None] | None = None  # one per block: values besides tokens that its hash covers
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    ownership: str | None = None
    session_id: str | None = None  # x-session-id of the request that computed the blocks


class BlockRemoved(msgspec.Struct, tag=True, omit_defaults=True):
    """KV event: blocks are no longer in the cache or the host tier."""

    block_hashes: list[int]
    medium: str | None


class AllBlocksCleared(msgspec.Struct, tag=True):
    """KV event: all blocks were removed from the cache."""


KvEvent = BlockStored | BlockRemoved | AllBlocksCleared


class KVEventPublisher:
    """`BlockListener` that publishes KV events.

    The engine's thread calls it and sends the events. A separate thread serves replays. The constructor binds the
    sockets and raises `zmq.ZMQError` if that fails. An address can end in `:*` for any free port. `endpoint` and
    `replay_endpoint` are the addresses in use. Call `close` after the engine's thread has ended.
    """

    def __init__(
        self, endpoint: str, replay_endpoint: str | None = None, *, topic: str = "", encoding: Encoding = "map"
    ) -> None:
        self._topic = topic.encode()
        self._encode = msgspec.msgpack.Encoder().encode
        self._encoding = encoding
        self._events: list[KvEvent] = []  # events of the current step
        self._sequence = 0
        self._replay_buffer: deque[tuple[bytes, bytes]] = deque(maxlen=REPLAY_BATCHES_MAX)
        self._replay_lock = threading.Lock()
        self._context = zmq.Context()
        self._replay_thread: threading.Thread | None = None
        try:
            self._pub_socket = self._bind(zmq.PUB, endpoint, SEND_QUEUE_MAX)
            self.endpoint = self._pub_socket.get_string(zmq.LAST_ENDPOINT)
            self.replay_endpoint: str | None = None
            if replay_endpoint is not None:
                router = self._bind(zmq.ROUTER, replay_endpoint, REPLAY_BATCHES_MAX + 1)
                self.replay_endpoint = router.get_string(zmq.LAST_ENDPOINT)
                self._replay_thread = threading.Thread(
                    target=self._replay, args=(router,), name="kv replay", daemon=True
                )
                self._replay_thread.start()
        except zmq.ZMQError:
            self._context.destroy(linger=0)
            raise

    def close(self) -> None:
        """Closes the sockets and waits for the replay thread."""
        self._pub_socket.close(linger=0)
        self._context.term()  # wakes the replay thread, which closes its socket
        if self._replay_thread is not None:
            self._replay_thread.join()

    # -- the block pool's listener -------------------------------------------------------------------------------

    def stored(self, block: CachedBlock) -> None:
        """Adds a stored block to the events of the current step. Blocks that form a chain become one event."""
        block_hash = _wire_hash(block.block_hash)
        parent = None if block.parent == ROOT_HASH else _wire_hash(block.parent)
        adapter = block.adapter
        # vLLM names the adapter and the block's images in every block, and the salt in the first one.
        keys = ((adapter.name,) if adapter else ()) + block.images
        extra_keys = (*keys, block.cache_salt) if block.cache_salt else keys or None
        last = self._events[-1] if self._events else None
        if (
            isinstance(last, BlockStored)
            and parent == last.block_hashes[-1]
            and (last.session_id or "") == block.session_id
        ):
            if last.extra_keys is None and extra_keys:
                last.extra_keys = [None] * len(last.block_hashes)
            if last.extra_keys is not None:
                last.extra_keys.append(extra_keys)
            last.block_hashes.append(block_hash)
            last.token_ids += block.token_ids
            return
        self._events.append(
            BlockStored(
                block_hashes=[block_hash],
                parent_block_hash=parent,
                token_ids=list(block.token_ids),
                block_size=len(block.token_ids),
                lora_id=adapter.number if adapter else None,
                medium=MEDIUM,
                lora_name=adapter.name if adapter else None,
                extra_keys=[extra_keys] if extra_keys else None,
                session_id=block.session_id or None,
            )
        )

    def removed(self, block_hash: bytes) -> None:
        last = self._events[-1] if self._events else None
        if isinstance(last, BlockRemoved):
            last.block_hashes.append(_wire_hash(block_hash))
        else:
            self._events.append(BlockRemoved(block_hashes=[_wire_hash(block_hash)], medium=MEDIUM))

    def cleared(self) -> None:
        self._events.append(AllBlocksCleared())

    def end_step(self) -> None:
        """Publishes the events since the last call as one batch."""
        if not self._events:
            return
        pending, self._events = self._events, []
        events = pending if self._encoding == "map" else [_as_array(event) for event in pending]
        payload = self._encode((time.time(), events, 0))
        number = self._sequence.to_bytes(8, "big")
        self._sequence += 1
        with self._replay_lock:
            self._replay_buffer.append((number, payload))
        self._pub_socket.send_multipart((self._topic, number, payload))

    # -- replays ---------------------------------------------------------------------------------------------------

    def _bind(self, kind: int, endpoint: str, send_queue_max: int) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.set_hwm(send_queue_max)
        socket.linger = 0
        socket.bind(endpoint)
        return socket

    def _replay(self, router: zmq.Socket[bytes]) -> None:
        """Serves replays until the context is closed. Ignores malformed requests."""
        try:
            while True:
                client, *request = router.recv_multipart()
                if len(request) == 2 and len(request[1]) == 8:
                    self._send_batches(router, client, int.from_bytes(request[1], "big"))
        except zmq.ContextTerminated:
            router.close(linger=0)

    def _send_batches(self, router: zmq.Socket[bytes], client: bytes, first: int) -> None:
        with self._replay_lock:
            batches = list(self._replay_buffer)
        for number, payload in batches:
            if int.from_bytes(number, "big") >= first:
                router.send_multipart((client, b"", self._topic, number, payload))
        router.send_multipart((client, b"", b"", END_OF_REPLAY, b""))


def _as_array(event: KvEvent) -> tuple[object, ...]:
    return type(event).__name__, *msgspec.structs.astuple(event)


def _wire_hash(block_hash: bytes) -> int:
    return int.from_bytes(block_hash, "big") & _HASH_MASK
