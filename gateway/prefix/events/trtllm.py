"""Events from TensorRT-LLM's server, which is asked for them: `POST /kv_cache_events` gives what has happened since the
last time, and forgets it. So one gateway alone may ask; a second one would take the first one's events.

An answer is a JSON list of `{event_id, data}`; `data.type` is created, stored, removed or updated. Ids count up by one.
Needs `kv_cache_config.event_buffer_max_size` above 0 and `enable_block_reuse` there. What moves between GPU and host
(updated) stays findable, and is left as it was.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

import msgspec

from gateway.prefix.events.base import BlocksRemoved, BlocksStored, CacheEventListener, EventCounts

POLL_SECONDS = 0.5
POLL_MAX_SECONDS = 30.0  # between two tries of a server that does not answer
PATH = "/kv_cache_events"

log = logging.getLogger("warmpath.kv_events")

Post = Callable[[], Awaitable[bytes | None]]
"""One request: the answer's body, or None where there was no good one."""


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
    def __init__(self, post: Post, listener: CacheEventListener, counts: EventCounts) -> None:
        self._post = post
        self._listener = listener
        self._counts = counts
        self._next: int | None = None

    async def run(self) -> None:
        pause = POLL_SECONDS
        while True:
            body = await self._post()
            answered = body is not None and self.take(body)
            pause = POLL_SECONDS if answered else min(2 * pause, POLL_MAX_SECONDS)
            await asyncio.sleep(pause)

    def take(self, body: bytes) -> bool:
        """Apply one answer. False where it is none."""
        try:
            events = _decoder.decode(body or b"[]")
        except msgspec.DecodeError as error:
            self._counts.malformed += 1
            if self._counts.malformed == 1:
                log.warning("%s does not give KV events: %s", PATH, error)
            return False
        for event in events:
            self._follow(event.event_id)
            data = event.data
            if data.type == "stored" and data.blocks:
                hashes = tuple(block.block_hash for block in data.blocks)
                self._listener.stored(BlocksStored(hashes, data.parent_hash, len(data.blocks[0].tokens)))
            elif data.type == "created":  # the engine's cache is new, and empty
                self._listener.cleared()
            elif data.type == "removed":
                self._listener.removed(BlocksRemoved(tuple(data.block_hashes)))
        self._counts.batches += bool(events)
        return True

    def _follow(self, event_id: int) -> None:
        if self._next is not None and event_id < self._next:
            self._listener.cleared()  # it counts from the beginning: it was started anew
        elif self._next is not None and event_id > self._next:
            self._counts.gaps += 1
            self._listener.events_lost()
        self._next = event_id + 1
