"""The ZeroMQ source on real sockets, with a publisher that can lose batches and with the bundled engine's."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import msgspec
import pytest
import zmq

from backend.engine.cached_block import ROOT_HASH, CachedBlock, hash_block
from backend.server.kv_events import Encoding, KVEventPublisher
from gateway.prefix.events import zmq as zmq_source
from gateway.prefix.events.base import BlocksRemoved, BlocksStored, EventCounts
from gateway.prefix.events.zmq import ZmqEventSource
from tests.gateway.prefix.events.conftest import WAIT_SECONDS, Recorder

HELLO = 999_999  # published repeatedly until the subscription is active


class Publisher:
    """Sends batches of any number, and replays those that it has kept, in vLLM's newer or older frames."""

    def __init__(self, *, replays: bool = True, with_topic: bool = True) -> None:
        self._context = zmq.Context()
        self._pub = self._context.socket(zmq.PUB)
        self.endpoint = self._bind(self._pub)
        self.kept: dict[int, bytes] = {}
        self.asked: list[int] = []
        self._with_topic = with_topic
        self.replay_endpoint: str | None = None
        if replays:
            router = self._context.socket(zmq.ROUTER)
            self.replay_endpoint = self._bind(router)
            self._thread = threading.Thread(target=self._replay, args=(router,))
            self._thread.start()

    @staticmethod
    def _bind(socket: zmq.Socket[bytes]) -> str:
        socket.linger = 0
        socket.bind("tcp://127.0.0.1:*")
        return socket.get_string(zmq.LAST_ENDPOINT)

    def _replay(self, router: zmq.Socket[bytes]) -> None:
        try:
            while True:
                client, _, first = router.recv_multipart()
                self.asked.append(int.from_bytes(first, "big"))
                topic = [b"topic"] if self._with_topic else []
                for number, payload in sorted(self.kept.items()):
                    if number >= self.asked[-1]:
                        router.send_multipart([client, b"", *topic, number.to_bytes(8, "big"), payload])
                router.send_multipart([client, b"", *topic, b"\xff" * 8, b""])
        except zmq.ContextTerminated:
            router.close()

    def keep(self, number: int, *, at: float | None = None) -> bytes:
        """A batch that removes the block of its own number."""
        self.kept[number] = msgspec.msgpack.encode([number if at is None else at, [["BlockRemoved", [number]]], 0])
        return self.kept[number]

    def send(self, number: int, *, at: float | None = None) -> None:
        self._pub.send_multipart([b"topic", number.to_bytes(8, "big"), self.keep(number, at=at)])

    def send_frames(self, *frames: bytes) -> None:
        self._pub.send_multipart(frames)

    def close(self) -> None:
        self._pub.close()
        self._context.term()
        if self.replay_endpoint:
            self._thread.join()


@pytest.fixture(params=[True, False], ids=["topic in replays", "no topic"])
def publisher(request: pytest.FixtureRequest) -> Iterator[Publisher]:
    made = Publisher(with_topic=request.param)
    yield made
    made.close()


@asynccontextmanager
async def following(
    publisher: Publisher | KVEventPublisher, recorder: Recorder, counts: EventCounts | None = None
) -> AsyncIterator[None]:
    source = ZmqEventSource(publisher.endpoint, publisher.replay_endpoint, recorder, counts or EventCounts())
    task = asyncio.create_task(source.run())
    yield
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def subscribed(publisher: Publisher, recorder: Recorder, number: int) -> None:
    """Send one batch until it is received, then clear the record."""
    async with asyncio.timeout(WAIT_SECONDS):
        while removed(number) not in recorder.received:
            publisher.send(number)
            await asyncio.sleep(0.01)
    recorder.received.clear()


def removed(*numbers: int) -> BlocksRemoved:
    return BlocksRemoved(numbers)


def received_up_to(recorder: Recorder, number: int) -> bool:
    return removed(number) in recorder.received


async def test_earlier_batches_are_replayed_and_later_ones_follow(publisher: Publisher, recorder: Recorder) -> None:
    publisher.keep(0)
    publisher.keep(1)
    async with following(publisher, recorder):
        await recorder.until(lambda: received_up_to(recorder, 1))
        assert recorder.received == [removed(0), removed(1)]
        await subscribed(publisher, recorder, 2)
        publisher.send(3)
        await recorder.until(lambda: received_up_to(recorder, 3))
        assert recorder.received == [removed(3)]


async def test_a_gap_is_filled_by_a_replay(publisher: Publisher, recorder: Recorder) -> None:
    counts = EventCounts()
    async with following(publisher, recorder, counts):
        await subscribed(publisher, recorder, 0)
        publisher.keep(1)
        publisher.keep(2)
        publisher.send(3)
        await recorder.until(lambda: received_up_to(recorder, 3))
    assert recorder.received == [removed(1), removed(2), removed(3)]
    assert publisher.asked == [0, 1]
    assert (counts.gaps, counts.batches, counts.malformed) == (1, 4, 0)


async def test_a_gap_that_no_replay_fills_is_reported(publisher: Publisher, recorder: Recorder) -> None:
    async with following(publisher, recorder):
        await subscribed(publisher, recorder, 0)
        publisher.keep(2)  # but not 1
        publisher.send(3)
        publisher.send(4)
        await recorder.until(lambda: received_up_to(recorder, 4))
    assert recorder.received == ["lost", removed(3), removed(4)]


async def test_a_gap_without_a_replay_socket_is_reported(recorder: Recorder) -> None:
    publisher = Publisher(replays=False)
    async with following(publisher, recorder):
        await subscribed(publisher, recorder, 7)  # the first batch received is the start
        publisher.send(9)
        await recorder.until(lambda: received_up_to(recorder, 9))
    assert recorder.received == ["lost", removed(9)]
    publisher.close()


async def test_a_replay_that_hangs_times_out(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zmq_source, "REPLAY_WAIT_SECONDS", 0.05)
    publisher = Publisher(replays=False)
    publisher.replay_endpoint = "tcp://127.0.0.1:9"  # no listener
    async with following(publisher, recorder):
        await subscribed(publisher, recorder, 0)
        publisher.send(2)
        await recorder.until(lambda: received_up_to(recorder, 2))
    assert recorder.received == ["lost", removed(2)]
    publisher.replay_endpoint = None
    publisher.close()


async def test_a_repeated_batch_is_applied_once(publisher: Publisher, recorder: Recorder) -> None:
    async with following(publisher, recorder):
        await subscribed(publisher, recorder, 5)
        publisher.send(6)
        publisher.send(5)
        publisher.send(6)
        publisher.send(7)
        await recorder.until(lambda: received_up_to(recorder, 7))
    assert recorder.received == [removed(6), removed(7)]


async def test_a_restarted_engine_has_an_empty_cache(publisher: Publisher, recorder: Recorder) -> None:
    async with following(publisher, recorder):
        await subscribed(publisher, recorder, 5)
        publisher.kept.clear()
        publisher.keep(0, at=100)
        publisher.send(1, at=101)
        await recorder.until(lambda: received_up_to(recorder, 1))
    assert recorder.received == ["cleared", removed(0), removed(1)]


async def test_a_malformed_batch_is_counted_and_skipped(publisher: Publisher, recorder: Recorder) -> None:
    counts = EventCounts()
    async with following(publisher, recorder, counts):
        await subscribed(publisher, recorder, 0)
        publisher.send_frames(b"alone")
        publisher.send_frames(b"topic", b"short", b"")
        publisher.send_frames(b"topic", b"\0" * 8, b"\xc1")
        publisher.send(1)
        await recorder.until(lambda: received_up_to(recorder, 1))
    assert (counts.malformed, counts.gaps) == (3, 0)


@pytest.mark.parametrize("encoding", ["map", "array"])
async def test_the_bundled_engines_publisher(recorder: Recorder, encoding: Encoding) -> None:
    publisher = KVEventPublisher("tcp://127.0.0.1:*", "tcp://127.0.0.1:*", encoding=encoding)
    first = CachedBlock(hash_block(ROOT_HASH, (1, 2)), ROOT_HASH, (1, 2), "salt", "call-1")
    second = CachedBlock(hash_block(first.block_hash, (3, 4)), first.block_hash, (3, 4), "", "call-1")
    for block in (first, second):
        publisher.stored(block)
    publisher.removed(second.block_hash)
    publisher.end_step()
    publisher.cleared()
    publisher.end_step()
    async with following(publisher, recorder):
        await recorder.until(lambda: "cleared" in recorder.received)
    hashes = tuple(int.from_bytes(block.block_hash[-8:], "big") for block in (first, second))
    assert recorder.received == [BlocksStored(hashes, None, 2, "call-1"), BlocksRemoved((hashes[1],)), "cleared"]
    publisher.close()
