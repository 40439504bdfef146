"""KV events over ZeroMQ: from vLLM, SGLang, the bundled engine, and other publishers of the same format.

Batches are numbered. A publisher drops batches for a slow subscriber, so a gap in the numbers means lost events; they
are requested from the replay socket. If that has not kept them, the listener's `events_lost` is called. A number that
was seen before belongs to a batch that a replay has delivered already, unless the batch is newer than the last one:
then the engine was restarted, and its cache is empty.
"""

from __future__ import annotations

import asyncio
import logging

import zmq
import zmq.asyncio

from gateway.prefix.events.base import BlocksRemoved, BlocksStored, CacheEventListener, EventCounts
from gateway.prefix.events.wire import EventBatch, MalformedBatch, read_batch

RECEIVE_QUEUE_MAX = 100_000  # batches that are queued here before the publisher drops some
RECONNECT_FIRST_MS = 100
RECONNECT_MAX_MS = 10_000
REPLAY_WAIT_SECONDS = 2.0  # for each batch of a replay
REPLAY_BATCHES_MAX = 100_000
LINGER_MS = 0
NUMBER_BYTES = 8

log = logging.getLogger("warmpath.kv_events")


class ZmqEventSource:
    """Subscribes to one engine's events. An `EventSource`."""

    def __init__(
        self, endpoint: str, replay_endpoint: str | None, listener: CacheEventListener, counts: EventCounts
    ) -> None:
        self._endpoint = endpoint
        self._replay_endpoint = replay_endpoint
        self._listener = listener
        self._counts = counts
        self._next_number: int | None = None  # of the next batch; None before the first one
        self._last_at = 0.0

    async def run(self) -> None:
        context = zmq.asyncio.Context()
        context.setsockopt(zmq.IPV6, True)  # in addition to IPv4
        subscriber = context.socket(zmq.SUB)
        try:
            subscriber.set_hwm(RECEIVE_QUEUE_MAX)
            subscriber.reconnect_ivl, subscriber.reconnect_ivl_max = RECONNECT_FIRST_MS, RECONNECT_MAX_MS
            subscriber.subscribe(b"")
            subscriber.connect(self._endpoint)
            await self._replay(context, 0)
            while True:
                frames = await subscriber.recv_multipart()
                await self._receive(context, frames)
        finally:
            subscriber.close(LINGER_MS)
            context.destroy(LINGER_MS)

    async def _receive(self, context: zmq.asyncio.Context, frames: list[bytes]) -> None:
        try:
            number, batch = _read(frames)
        except MalformedBatch as error:
            self._counts.malformed += 1
            if self._counts.malformed == 1:
                log.warning("%s sent something other than KV events: %s", self._endpoint, error)
            return
        if self._next_number is not None and number < self._next_number:
            if batch.at <= self._last_at:
                return
            self._listener.cleared()
            self._next_number = 0
        if self._next_number is not None and number > self._next_number:
            self._counts.gaps += 1
            await self._replay(context, self._next_number, number)
            if self._next_number < number:
                self._listener.events_lost()
        if self._next_number is None or number >= self._next_number:
            self._apply(number, batch)

    def _apply(self, number: int, batch: EventBatch) -> None:
        for event in batch.events:
            if isinstance(event, BlocksStored):
                self._listener.stored(event)
            elif isinstance(event, BlocksRemoved):
                self._listener.removed(event)
            else:
                self._listener.cleared()
        self._counts.batches += 1
        self._next_number, self._last_at = number + 1, batch.at

    async def _replay(self, context: zmq.asyncio.Context, first: int, end: int | None = None) -> None:
        """Apply the batches from `first` to before `end` (None: all), as far as the engine has kept them.

        With `end`, a replay that begins later than `first` is useless. At the start it is not: nothing was known
        before.
        """
        if self._replay_endpoint is None:
            return
        with context.socket(zmq.DEALER) as replay_socket:
            replay_socket.linger = LINGER_MS
            replay_socket.set_hwm(RECEIVE_QUEUE_MAX)
            replay_socket.connect(self._replay_endpoint)
            await replay_socket.send_multipart([b"", first.to_bytes(NUMBER_BYTES, "big")])
            for _ in range(REPLAY_BATCHES_MAX):
                try:
                    async with asyncio.timeout(REPLAY_WAIT_SECONDS):
                        frames = await replay_socket.recv_multipart()
                    if not frames[-1]:  # the end of the replay: number -1 and no batch
                        return
                    number, batch = _read(frames)
                except (TimeoutError, MalformedBatch) as error:
                    log.warning("the replay from %s ended early: %r", self._replay_endpoint, error)
                    return
                if end is not None and (number != self._next_number or number >= end):
                    return
                self._apply(number, batch)


def _read(frames: list[bytes]) -> tuple[int, EventBatch]:
    """Split a message: its last two frames are number and batch.

    A topic, or what a socket type adds, comes before them.
    """
    if len(frames) < 2 or len(frames[-2]) != NUMBER_BYTES:
        raise MalformedBatch("the frames are not a topic, a number of 8 bytes and a batch")
    return int.from_bytes(frames[-2], "big"), read_batch(frames[-1])
