"""KV events of TensorRT-LLM's server, by polling: `POST /kv_cache_events` returns the events since the last request.

The server forgets the events that it has returned. So only one gateway may poll it: a second one would take the first
one's events.

A response is a JSON list of `{event_id, data}`; `data.type` is created, stored, removed or updated. Ids count up by
one. The server needs `kv_cache_config.event_buffer_max_size` above 0 and `enable_block_reuse`. Blocks that move between
GPU and host memory (updated) remain in the cache, so that event is ignored.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

import msgspec

from gateway.prefix.events.base import BlocksRemoved, BlocksStored, CacheEventListener, EventCounts

POLL_SECONDS = 0.5
POLL_MAX_SECONDS = 30.0  # between two requests while the server does not answer
PATH = "/kv_cache_events"

log = logging.getLogger("warmpath.kv_events")

Post = Callable[[], Awaitable[bytes | None]]
"""Sends one request. Returns the body of a successful response, else None."""


class _Token(msgspec.Struct):
    pass


class _Block(msgspec.Struct):
    block_hash: int
    tokens: list[_Token] = []


class _Data(msgspec.Struct):
    type: str
    parent_hash: int | None = None
    blocks: list[_Block] = []
    block_hashes: list[int] = []


class _Event(msgspec.Struct):
    event_id: int
    data: _Data


_decoder = msgspec.json.Decoder(list[_Event])


class TensorRTEventSource:
    """Polls one server's events. An `EventSource`."""

    def __init__(self, post: Post, listener: CacheEventListener, counts: EventCounts) -> None:
        self._post = post
        self._listener = listener
        self._counts = counts
        self._next_event_id: int | None = None

    async def run(self) -> None:
        pause = POLL_SECONDS
        while True:
            body = await self._post()
            answered = body is not None and self.take(body)
            pause = POLL_SECONDS if answered else min(2 * pause, POLL_MAX_SECONDS)
            await asyncio.sleep(pause)

    def take(self, body: bytes) -> bool:
        """Apply one response. False if it is malformed."""
        try:
            events = _decoder.decode(body or b"[]")
        except msgspec.DecodeError as error:
            self._counts.malformed += 1
            if self._counts.malformed == 1:
                log.warning("%s returned something other than KV events: %s", PATH, error)
            return False
        for event in events:
            self._check_event_id(event.event_id)
            data = event.data
            if data.type == "stored" and data.blocks:
                hashes = tuple(block.block_hash for block in data.blocks)
                self._listener.stored(BlocksStored(hashes, data.parent_hash, len(data.blocks[0].tokens)))
            elif data.type == "created":  # a new cache, which is empty
                self._listener.cleared()
            elif data.type == "removed":
                self._listener.removed(BlocksRemoved(tuple(data.block_hashes)))
        self._counts.batches += bool(events)
        return True

    def _check_event_id(self, event_id: int) -> None:
        if self._next_event_id is not None and event_id < self._next_event_id:
            self._listener.cleared()  # ids start again: the server was restarted
        elif self._next_event_id is not None and event_id > self._next_event_id:
            self._counts.gaps += 1
            self._listener.events_lost()
        self._next_event_id = event_id + 1
