"""Loads from real engines and from peers with every fault: the request is served as if nothing had been loaded."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread

import pytest
from torch import Tensor

from backend.engine.async_engine import AsyncEngine
from backend.engine.block_transfer import BlockTransfer
from backend.engine.config import EngineConfig
from backend.engine.engine import Engine
from backend.engine.request import Request
from backend.engine.sampling_params import SamplingParams
from backend.kv_transfer import block_stream, prefix_loader
from backend.kv_transfer.block_layout import layout_of
from backend.kv_transfer.block_stream import END, HASH_BYTES, encode_entries, encode_header, split_hashes
from backend.kv_transfer.peers import Peer, parse_rule
from backend.kv_transfer.prefix_loader import Outcome, PrefixLoader, Transfer
from tests.backend.checkpoints import VOCAB_SIZE
from tests.ports import refusing_port

BLOCK_SIZE = 4
PROMPT = [(5 * i * i + i) % VOCAB_SIZE for i in range(35)]  # eight full blocks and three more tokens
LONG = 60.0  # seconds that a test never waits, unless it fails
OK = b"HTTP/1.1 200 OK\r\ncontent-type: application/octet-stream\r\nconnection: close\r\n\r\n"

Answer = Callable[[socket.socket, list[bytes]], None]


def request_of(prompt: list[int] = PROMPT) -> Request:
    return Request("r", list(prompt), SamplingParams(max_tokens=4, temperature=0.0))


@pytest.fixture
async def engine(checkpoint_dir: Callable[[str], Path]) -> AsyncIterator[AsyncEngine]:
    config = EngineConfig(model_dir=checkpoint_dir("llama"), num_blocks=32, block_size=BLOCK_SIZE, num_threads=1)
    engine = AsyncEngine(Engine.load(config))
    await engine.start()
    yield engine
    await engine.stop()
    engine.engine.check_integrity()


@pytest.fixture
def blocks(checkpoint_dir: Callable[[str], Path]) -> Tensor:
    """The contents of the prompt's eight blocks."""
    config = EngineConfig(model_dir=checkpoint_dir("llama"), num_blocks=32, block_size=BLOCK_SIZE, num_threads=1)
    source = Engine.load(config)
    request = request_of()
    source.add(request)
    while source.has_unfinished:
        source.step()
    return BlockTransfer(source.scheduler, source.runner.kv).read(request.block_hashes[:8])


@pytest.fixture
def loader(engine: AsyncEngine) -> Iterator[PrefixLoader]:
    inner = engine.engine
    blocks, layout = BlockTransfer(inner.scheduler, inner.runner.kv), layout_of(inner.config, inner.runner.kv)
    loader = PrefixLoader(engine, blocks, layout, [parse_rule("127.0.0.1")], LONG)
    yield loader
    loader.close()


@contextmanager
def peer(answer: Answer) -> Iterator[Peer]:
    """A server that reads the hashes of one request, and then does what `answer` does with its connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            connection, _ = listener.accept()
            with connection, connection.makefile("rb") as stream:
                lines = iter(stream.readline, b"\r\n")
                headers = dict(line.decode().lower().strip().split(": ") for line in list(lines)[1:])
                answer(connection, split_hashes(stream.read(int(headers["content-length"]))))

        thread = Thread(target=serve, daemon=True)
        thread.start()
        yield Peer("127.0.0.1", listener.getsockname()[1])
        thread.join(LONG)
        assert not thread.is_alive()


async def output_of(engine: AsyncEngine, request: Request) -> list[int]:
    async for _ in engine.submit(request):
        pass
    return request.token_ids[request.num_prompt_tokens :]


def stream_of(loader: PrefixLoader, hashes: list[bytes], content: Tensor) -> bytes:
    batch = encode_entries(hashes, content) + content.numpy().tobytes()
    return OK + encode_header(loader._layout) + batch


async def test_what_the_peer_sends_is_not_computed(engine: AsyncEngine, loader: PrefixLoader, blocks: Tensor) -> None:
    def answer(connection: socket.socket, hashes: list[bytes]) -> None:
        assert len(hashes) == 8 and {len(each) for each in hashes} == {HASH_BYTES}
        connection.sendall(stream_of(loader, hashes, blocks) + END)

    request = request_of()
    with peer(answer) as source:
        assert await loader.load(request, source, LONG) == Transfer(source, 8, blocks.nbytes, Outcome.COMPLETE)
    loaded = await output_of(engine, request)
    assert (request.num_cached_tokens, request.num_transferred_tokens) == (32, 32)
    assert engine.stats().transferred_prompt_tokens_total == 32
    engine.call(engine.engine.scheduler.pool.clear).result()
    assert loaded == await output_of(engine, request_of())


async def test_batches_are_added_as_they_arrive(
    engine: AsyncEngine, loader: PrefixLoader, blocks: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(block_stream, "BATCH_BYTES", 3 * blocks.shape[1])

    def answer(connection: socket.socket, hashes: list[bytes]) -> None:
        connection.sendall(OK + encode_header(loader._layout))
        for start in (0, 3, 6):
            part = blocks[start : start + 3]
            connection.sendall(encode_entries(hashes[start : start + 3], part) + part.numpy().tobytes())
        connection.sendall(END)

    request = request_of()
    with peer(answer) as source:
        transfer = await loader.load(request, source, LONG)
    assert (transfer.num_blocks, transfer.outcome) == (8, Outcome.COMPLETE)
    await output_of(engine, request)
    assert request.num_cached_tokens == 32


def _cut(loader: PrefixLoader, blocks: Tensor) -> Answer:
    def answer(connection: socket.socket, hashes: list[bytes]) -> None:
        first = stream_of(loader, hashes[:4], blocks[:4])
        second = encode_entries(hashes[4:], blocks[4:]) + blocks[4:].numpy().tobytes()
        connection.sendall(first + second[: len(second) // 2])

    return answer


def _missing(loader: PrefixLoader, blocks: Tensor) -> Answer:
    return lambda connection, hashes: connection.sendall(stream_of(loader, hashes[:4], blocks[:4]) + END)


def _nothing(loader: PrefixLoader, blocks: Tensor) -> Answer:
    return lambda connection, hashes: connection.sendall(OK + encode_header(loader._layout) + END)


def _corrupt(loader: PrefixLoader, blocks: Tensor) -> Answer:
    def answer(connection: socket.socket, hashes: list[bytes]) -> None:
        second = bytearray(encode_entries(hashes[4:], blocks[4:]) + blocks[4:].numpy().tobytes())
        second[-100] ^= 1
        connection.sendall(stream_of(loader, hashes[:4], blocks[:4]) + second + END)

    return answer


def _other_model(loader: PrefixLoader, blocks: Tensor) -> Answer:
    def answer(connection: socket.socket, hashes: list[bytes]) -> None:
        stream = stream_of(loader, hashes, blocks)
        connection.sendall(stream.replace(loader._layout.model.encode(), b"f" * 64))

    return answer


def _error(loader: PrefixLoader, blocks: Tensor) -> Answer:
    return lambda connection, _: connection.sendall(b"HTTP/1.1 503 Busy\r\ncontent-length: 0\r\n\r\n")


def _garbage(loader: PrefixLoader, blocks: Tensor) -> Answer:
    return lambda connection, _: connection.sendall(b"\x00\xff" * 5000)


def _web_page(loader: PrefixLoader, blocks: Tensor) -> Answer:
    return lambda connection, _: connection.sendall(OK + b"<html>" * 100)


@pytest.mark.parametrize(
    ("fault", "outcome", "num_blocks"),
    [
        (_cut, Outcome.UNREACHABLE, 4),
        (_missing, Outcome.PARTIAL, 4),
        (_nothing, Outcome.PARTIAL, 0),
        (_corrupt, Outcome.CORRUPT, 4),
        (_other_model, Outcome.OTHER_LAYOUT, 0),
        (_error, Outcome.REFUSED, 0),
        (_garbage, Outcome.UNREACHABLE, 0),
        (_web_page, Outcome.MALFORMED, 0),
    ],
)
async def test_after_a_fault_the_rest_is_computed(
    engine: AsyncEngine,
    loader: PrefixLoader,
    blocks: Tensor,
    fault: Callable[[PrefixLoader, Tensor], Answer],
    outcome: Outcome,
    num_blocks: int,
) -> None:
    request = request_of()
    with peer(fault(loader, blocks)) as source:
        transfer = await loader.load(request, source, LONG)
    assert (transfer.outcome, transfer.num_blocks) == (outcome, num_blocks)
    faulty = await output_of(engine, request)
    assert request.num_cached_tokens == request.num_transferred_tokens == num_blocks * BLOCK_SIZE
    engine.call(engine.engine.scheduler.pool.clear).result()
    assert faulty == await output_of(engine, request_of())


@pytest.mark.parametrize("sent", [0, 10, 100, 5000])
async def test_a_stalled_peer_costs_the_time_limit_only(
    engine: AsyncEngine, loader: PrefixLoader, blocks: Tensor, sent: int
) -> None:
    ended = Event()

    def answer(connection: socket.socket, hashes: list[bytes]) -> None:
        connection.sendall(stream_of(loader, hashes, blocks)[:sent])
        connection.settimeout(LONG)
        assert connection.recv(1) == b"", "the loader closes the connection"
        ended.set()

    request = request_of()
    with peer(answer) as source:
        transfer = await loader.load(request, source, 0.05)
        assert await asyncio.to_thread(ended.wait, LONG)
    assert transfer == Transfer(source, 0, 0, Outcome.TIMEOUT)
    assert len(await output_of(engine, request)) == 4
    assert request.num_cached_tokens == 0


async def test_a_peer_that_sends_a_byte_now_and_then_does_not_extend_the_limit(loader: PrefixLoader) -> None:
    def answer(connection: socket.socket, hashes: list[bytes]) -> None:
        connection.sendall(OK)
        with pytest.raises(OSError):
            while True:
                connection.sendall(b"W")
                time.sleep(0.01)

    with peer(answer) as source:
        transfer = await loader.load(request_of(), source, 0.1)
    assert transfer.outcome in (Outcome.TIMEOUT, Outcome.MALFORMED)


async def test_no_request_waits_for_a_peer_that_was_silent_a_moment_ago(
    engine: AsyncEngine, loader: PrefixLoader, blocks: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    with refusing_port() as port:
        gone = Peer("127.0.0.1", port)
        assert (await loader.load(request_of(), gone, LONG)).outcome is Outcome.UNREACHABLE
        assert (await loader.load(request_of(), gone, LONG)).outcome is Outcome.PAUSED
    with peer(_error(loader, blocks)) as other:
        assert (await loader.load(request_of(), other, LONG)).outcome is Outcome.REFUSED
    with peer(_other_model(loader, blocks)) as other:
        for expected in (Outcome.OTHER_LAYOUT, Outcome.PAUSED):
            assert (await loader.load(request_of(), other, LONG)).outcome is expected
    monkeypatch.setattr(prefix_loader, "PAUSE_SECONDS", 0.0)
    monkeypatch.setattr(loader, "_seconds_max", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = Peer("127.0.0.1", silent.getsockname()[1])
        assert (await loader.load(request_of(), address, LONG)).outcome is Outcome.TIMEOUT
        assert (await loader.load(request_of(), address, LONG)).outcome is Outcome.TIMEOUT, "the pause is over"
        monkeypatch.setattr(prefix_loader, "PAUSE_SECONDS", LONG)
        assert (await loader.load(request_of(), address, 0.01)).outcome is Outcome.TIMEOUT, "its own deadline"
        assert (await loader.load(request_of(), address, LONG)).outcome is Outcome.TIMEOUT
        assert (await loader.load(request_of(), address, LONG)).outcome is Outcome.PAUSED


async def test_a_request_that_is_given_up_closes_the_connection(loader: PrefixLoader) -> None:
    asked, ended = Event(), Event()

    def answer(connection: socket.socket, hashes: list[bytes]) -> None:
        asked.set()
        connection.settimeout(LONG)
        assert connection.recv(1) == b""
        ended.set()

    with peer(answer) as source:
        load = asyncio.create_task(loader.load(request_of(), source, LONG))
        assert await asyncio.to_thread(asked.wait, LONG)
        load.cancel()
        with pytest.raises(asyncio.CancelledError):
            await load
        assert await asyncio.to_thread(ended.wait, LONG)


async def test_a_peer_is_not_blamed_for_a_busy_engine(
    engine: AsyncEngine, loader: PrefixLoader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loader, "_seconds_max", 0.05)
    released = Event()
    busy = engine.call(lambda: released.wait(LONG))
    for _ in range(2):
        assert (await loader.load(request_of(), Peer("127.0.0.1", 1), LONG)).outcome is Outcome.TIMEOUT
    released.set()
    assert await asyncio.wrap_future(busy)


async def test_without_a_listener_and_without_permission_nothing_is_loaded(
    loader: PrefixLoader, caplog: pytest.LogCaptureFixture
) -> None:
    with refusing_port() as port:
        assert (await loader.load(request_of(), Peer("127.0.0.1", port), LONG)).outcome is Outcome.UNREACHABLE
        for _ in range(2):
            assert (await loader.load(request_of(), Peer("localhost", port), LONG)).outcome is Outcome.NOT_ALLOWED
    assert [record.levelname for record in caplog.records] == ["WARNING"], "the second one is not logged"


async def test_a_cached_prompt_asks_no_peer(engine: AsyncEngine, loader: PrefixLoader) -> None:
    await output_of(engine, request_of())
    unused = Peer("127.0.0.1", 1)
    assert (await loader.load(request_of(), unused, LONG)).outcome is Outcome.NOT_NEEDED


async def test_a_cache_that_fills_up_meanwhile_ends_the_load(
    engine: AsyncEngine, loader: PrefixLoader, blocks: Tensor
) -> None:
    taken: list[int] = []

    def answer(connection: socket.socket, hashes: list[bytes]) -> None:
        engine.call(lambda: taken.extend(engine.engine.scheduler.pool.allocate(28) or [])).result()
        connection.sendall(stream_of(loader, hashes, blocks) + END)

    with peer(answer) as source:
        transfer = await loader.load(request_of(), source, LONG)
    assert (transfer.outcome, transfer.num_blocks) == (Outcome.NO_ROOM, 0)
    engine.call(lambda: engine.engine.scheduler.pool.free(taken)).result()


async def test_an_engine_that_stops_ends_the_load(engine: AsyncEngine, loader: PrefixLoader) -> None:
    await engine.stop()
    transfer = await loader.load(request_of(), Peer("127.0.0.1", 1), LONG)
    assert transfer.outcome is Outcome.ENGINE_STOPPED
