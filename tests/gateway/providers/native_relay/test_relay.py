"""Streams that native code passes on, between real connections: with the same result as in Python, whatever happens."""

from __future__ import annotations

import asyncio
import gc
import random
import socket
import struct
import sys
import weakref
from collections.abc import Callable
from itertools import accumulate
from types import SimpleNamespace
from typing import Any

import pytest
import uvloop
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.billing.received_text import SAMPLE_BYTES
from gateway.core.timers import WaitBound
from gateway.providers.native_relay import relay as native_relay
from gateway.providers.native_relay.compiler import COMPILERS, CompileError, compile_relay, library_file
from gateway.providers.native_relay.relay import READS_MAX, StreamRelay, open_relay
from tests.gateway.endpoints.relayed import cut_at
from tests.gateway.providers.native_relay.streams import Stream, narrow_connection, new_relay, relayed, without_coding
from tests.gateway.providers.test_direct_text import DONE, END, EVENTS, SIZES, Passed, coded
from tests.gateway.providers.test_text_events import event

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the relay needs Linux")
LAST = coded(DONE) + END


async def in_python(reads: list[bytes]) -> Passed:
    return await relayed(None, reads)


async def a_native_stream(relay: StreamRelay, **options: Any) -> tuple[Stream, list[bytes]]:
    """A stream that native code passes on, and the reads so far."""
    stream, reads = Stream(relay), [coded(event("a")), coded(event("b"))]
    for name, value in options.items():
        setattr(stream, name, value)
    await stream.begin()
    for read in reads:
        await stream.send(read)
    assert stream.is_native()
    return stream, reads


async def test_texts_pass_natively_as_they_are(relay: StreamRelay) -> None:
    stream, reads = await a_native_stream(relay)
    texts = [" token", "é", "日本", "😀", 'say "hi"\n', "[DONE]", "x" * 5000]
    for text in texts:
        reads.append(coded(event(text, ascii_only=False)))
        await stream.send(reads[-1])
    assert stream.text.events == 2, "not counted before native code lets go"
    reads += [coded(event("c")) + coded(event("d")), LAST]
    for read in reads[-2:]:
        await stream.send(read)
    received = asyncio.create_task(stream.finish())
    passed = await received
    assert passed == await in_python(reads)
    assert stream.received.startswith(b"".join(reads[:-1])), "not coded again"
    assert relay.adopted == 1


OTHER_READS = [
    coded(event("b".ljust(0xAF - len(event("")))), "{:X}"),
    coded(event("b"), "0{:x}"),
    coded(event("b"), "{:x};name=value"),
    coded(event("b") + event("c")),
    coded(event("b"))[:-1],
    coded(event("b")[:20]) + coded(event("b")[20:]),
    coded(event("b")) + coded(event("c"))[:30],
    coded(event("b", usage={"prompt_tokens": 1})),
    coded(event("b").replace(b'"b"', b'"\x01"')),
    coded(event("b").replace(b'"b"', b'"\xff"')),
    coded(event("b").replace(b'"b"', b'"\xed\xa0\x80"')),
    coded(event("b").replace(b'"b"', b'"\xf4\x90\x80\x80"')),
    coded(event("b").replace(b'"b"', b'"\xc0\xaf"')),
    coded(event("b").replace(b'"b"', b'"\xe2\x82"')),
    coded(event("b").replace(b'"b"', b'"\\"')),
    coded(event("b").replace(b'"b"', b'"\\u00e9"')),
    coded(event("b").replace(b'"b"', b'"c", "d": "e"')),
    coded(event("b" * 70_000)),
    b"fffffffff\r\n" + event("b"),
    b"\r\n",
    b"x",
]


@pytest.mark.parametrize("read", OTHER_READS, ids=range(len(OTHER_READS)))
async def test_other_reads_are_handed_over(relay: StreamRelay, read: bytes) -> None:
    stream, reads = await a_native_stream(relay)
    reads += [coded(event("c")), read]
    for one in reads[2:]:
        await stream.send(one)
    await stream.handed_over()
    rest = {b"\r": [b"\n"], coded(event("c"))[29:30]: [coded(event("c"))[30:]]}.get(read[-1:], [])
    reads += [*rest, coded(event("d")), LAST]
    for one in reads[-2 - len(rest) :]:
        if not stream.relaying.done():
            await stream.send(one)
    passed, expected = await stream.finish(), await in_python(reads)
    assert passed == expected


async def test_a_stream_is_adopted_again_later_and_later_if_it_is_handed_over_soon(relay: StreamRelay) -> None:
    stream, _ = await a_native_stream(relay)
    adopted = []
    for _ in range(60):
        await stream.send(coded(event("c").replace(b'"c"', b'"\\u00e9"')))
        for _ in range(4):
            await stream.send(coded(event("d")))
        adopted.append(relay.adopted)
    await stream.send(LAST)
    await stream.finish()
    assert adopted[-1] < 8 < READS_MAX


async def test_bounds_and_samples_are_those_of_python(relay: StreamRelay) -> None:
    """The ledger's notes, the sample of the text, and the answer that may be resumed."""
    frames = [event(f"token {number}") for number in range(3 * SAMPLE_BYTES // len(event("token 1")))]
    noted: list[bytes] = []
    until = 2.0 * SAMPLE_BYTES
    stream, reads = await a_native_stream(relay, noted=noted, until=until)
    native = []
    for frame in frames:
        await stream.send(coded(frame))
        native.append(stream.is_native())
    reads += [*map(coded, frames), LAST]
    await stream.send(LAST)
    passed = await stream.finish()
    assert passed == await in_python(reads)
    assert b"".join(noted) == b"".join([event("b"), *frames])[: len(b"".join(noted))]
    received = [*accumulate((len(frame) for frame in frames), initial=len(event("a") + event("b")))][1:]
    late = until + 20 * len(frames[-1])  # a hand-over is noticed a few turns of the event loop later
    assert all(total < late for total, is_native in zip(received, native, strict=True) if is_native)
    assert sum(native) > 0.8 * sum(total < until for total in received)


async def test_the_time_of_the_last_chunk_is_known(relay: StreamRelay) -> None:
    stream, _ = await a_native_stream(relay)
    await stream.send(coded(event("c")))
    before = stream.wait.since
    assert stream.wait.refresh is not None
    stream.wait.refresh()
    assert stream.wait.since is not None and before is not None and stream.wait.since >= before
    shifted = stream.wait.since = stream.wait.since + 5  # by a time limit, for time that the event loop did not run
    stream.wait.refresh()
    assert stream.wait.since == shifted
    await stream.send(LAST)
    await stream.finish()
    assert stream.wait.refresh is None


async def test_a_time_limit_ends_a_silent_stream_and_no_other(relay: StreamRelay) -> None:
    """Chunks come for twice the time limit; then none comes."""
    stream, _ = await a_native_stream(relay)
    bound = WaitBound(1.0, task=stream.relaying)
    bound.since = stream.connection.loop.time()
    stream.wait.since = bound.since
    refresh = stream.wait.refresh
    assert refresh is not None

    def refreshed() -> None:
        refresh()
        bound.since = stream.wait.since

    bound.begin()
    bound.refresh = refreshed
    for _ in range(20):
        await asyncio.sleep(0.1)
        await stream.send(coded(event("c")))
        assert not bound.expired
    assert stream.is_native()
    with pytest.raises(asyncio.CancelledError):
        await stream.relaying
    assert bound.expired and not relay.streams
    bound.close()
    await stream.response.aclose()
    stream.close()


async def test_a_client_that_leaves_is_noticed_at_once(relay: StreamRelay) -> None:
    stream, _ = await a_native_stream(relay)
    stream.client_reads = False
    stream.client.close()
    await stream.handed_over()
    assert stream.flow.write_paused and stream.flow.when_lost is None
    for _ in range(20):  # the answer continues, as for a call that others follow
        await stream.send(coded(event("c")))
    assert relay.adopted == 1
    assert stream.text.events == 22
    stream.relaying.cancel()
    with pytest.raises(asyncio.CancelledError):
        await stream.relaying
    await stream.response.aclose()
    stream.close()


@pytest.mark.parametrize("reset", [False, True])
async def test_a_connection_that_ends_is_handed_over(relay: StreamRelay, reset: bool) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    connected = socket.create_connection(listener.getsockname())
    server, _ = listener.accept()
    listener.close()
    stream = Stream(relay)
    await stream.begin((server, connected))
    for text in "abc":
        await stream.send(coded(event(text)))
    assert stream.is_native()
    if reset:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    server.close()
    passed = await stream.finish()
    assert passed.payload == event("a") + event("b") + event("c") and passed.events == 3
    assert passed.failure and ("reset" in passed.failure.lower()) == reset


async def test_a_slow_client_is_waited_for_in_python(relay: StreamRelay) -> None:
    """What is sent to a client that does not read stays bounded in native code, which takes nothing more."""
    stream, reads = await a_native_stream(relay)
    stream.client_reads = False
    while not stream.client_transport.get_write_buffer_size():
        reads.append(coded(event(" token" * 100)))
        await stream.send(reads[-1])
    assert stream.client_transport.get_write_buffer_size()
    for _ in range(3):
        reads.append(coded(event("c")))
        await stream.send(reads[-1])
    assert not stream.is_native()
    await stream.read_to(coded(event("c")) * 3)
    stream.client_reads = True
    for _ in range(40):
        reads.append(coded(event("d")))
        await stream.send(reads[-1])
    assert stream.is_native(), "the client reads again"
    reads.append(LAST)
    await stream.send(LAST)
    assert await stream.finish() == await in_python(reads)


async def test_the_rest_of_an_event_follows_of_which_a_client_took_a_part(relay: StreamRelay) -> None:
    stream, reads = await a_native_stream(relay, client_sockets=narrow_connection)
    stream.client_reads = False
    reads.append(coded(event(" token" * 2_000)))
    await stream.send(reads[-1])
    await stream.handed_over()
    assert 0 < stream.client_transport.get_write_buffer_size() < len(reads[-1])
    assert stream.text.received == sum(len(without_coding(read)) for read in reads), "it is counted once"
    await stream.read_to(reads[-1])
    reads += [coded(event("c")), LAST]
    for read in reads[-2:]:
        await stream.send(read)
    assert await stream.finish() == await in_python(reads)


async def test_many_streams_at_once(relay: StreamRelay) -> None:
    choices = random.Random(1)
    usual = [coded(event(text, ascii_only=False)) for text in ("a", " token", "é" * 30)]
    other = [coded(event("b", usage={"prompt_tokens": 1})), coded(b": ping\n\n"), coded(event("a") + event("b"))]
    scripts = [
        [coded(event("a")), *choices.choices(usual + other, [20, 20, 20, 1, 1, 1], k=50), LAST] for _ in range(60)
    ]
    passed = await asyncio.gather(*(relayed(relay, script) for script in scripts))
    assert passed == [await in_python(script) for script in scripts]
    assert relay.adopted >= 60


async def test_streams_continue_in_python_when_the_relay_is_closed(relay: StreamRelay) -> None:
    stream, reads = await a_native_stream(relay)
    relay.close()
    assert not stream.is_native()
    reads += [coded(event("c")), coded(event("d")), LAST]
    for read in reads[2:]:
        await stream.send(read)
    assert not stream.is_native()
    assert await stream.finish() == await in_python(reads)


async def test_nothing_is_left_of_a_stream(relay: StreamRelay) -> None:
    stream, _ = await a_native_stream(relay)
    left = weakref.ref(stream.connection)
    await stream.send(LAST)
    await stream.finish()
    await asyncio.sleep(0.01)
    gc.disable()
    try:
        Stream.begun.clear()
        del stream
        assert left() is None, "a reference cycle"
    finally:
        gc.enable()


@pytest.mark.parametrize("which", ["deployment", "client"])
async def test_tls_stays_in_python(relay: StreamRelay, which: str, monkeypatch: pytest.MonkeyPatch) -> None:
    find, seen = native_relay._socket_of, list[Any]()

    def with_tls(transport: asyncio.Transport) -> int | None:
        seen.append(transport)
        if len(seen) == (1 if which == "deployment" else 2):
            tls = {"socket": transport.get_extra_info("socket"), "sslcontext": object()}
            return find(SimpleNamespace(get_extra_info=tls.get))  # type: ignore[arg-type]
        return find(transport)

    monkeypatch.setattr(native_relay, "_socket_of", with_tls)
    reads = [coded(event("a"))] * 20 + [LAST]
    assert await relayed(relay, reads) == await in_python(reads)
    assert relay.adopted == 0 and len(seen) == 2, "refused once for all"


@given(
    st.lists(st.tuples(EVENTS, SIZES, st.sampled_from([1, 1, 1, 2, 0])), max_size=16),
    st.lists(st.integers(0, 3000), max_size=6),
    st.sampled_from(["events", "cut", "pairs"]),
)
@settings(max_examples=100)
def test_any_stream_in_any_reads_is_relayed_as_in_python(
    sent: list[tuple[bytes, str, int]], offsets: list[int], how: str
) -> None:
    """The number says how many chunks an event fills; 0: it shares one with the next event."""
    chunks, joined = [coded(event(" a")), coded(event("b"))], b""
    for frame, size, parts in sent:
        joined += frame
        if parts == 1:
            chunks.append(coded(joined, size))
        elif parts == 2:
            chunks += [coded(joined[:9], size), coded(joined[9:], size)]
        joined = joined if parts == 0 else b""
    chunks.append(coded(joined + DONE) + END)
    reads = chunks
    if how == "cut":
        reads = [*chunks[:2], *cut_at(b"".join(chunks[2:]), offsets)]
    elif how == "pairs":
        reads = [*chunks[:2], *(b"".join(chunks[i : i + 2]) for i in range(2, len(chunks), 2))]

    async def both() -> tuple[Passed, Passed]:
        relay = new_relay()
        passed = await relayed(relay, reads)
        relay.close()
        return passed, await in_python(reads)

    runners: list[Callable[[], asyncio.AbstractEventLoop]] = [uvloop.new_event_loop, asyncio.new_event_loop]
    with asyncio.Runner(loop_factory=runners[len(sent) % 2]) as runner:
        passed, expected = runner.run(both())
    Stream.begun.clear()
    assert passed == expected


def test_without_a_library_there_is_no_relay(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setattr(native_relay, "library_file", lambda: tmp_path / "relay.so")
    assert open_relay() is None
    (tmp_path / "relay.so").write_bytes(b"of another machine")
    assert open_relay() is None


def test_a_machine_without_a_compiler_says_so(tmp_path: Any) -> None:
    with pytest.raises(CompileError, match="no C compiler"):
        compile_relay(tmp_path / "compiled", compilers=("no-such-compiler",))
    assert COMPILERS


def test_compiling_replaces_a_library_of_another_source(tmp_path: Any) -> None:
    new_relay()  # skips the test without a compiler
    (tmp_path / "relay-linux-x86_64-0123.so").touch()
    made = compile_relay(tmp_path)
    assert [*tmp_path.iterdir()] == [made] and made.name == library_file().name
    assert compile_relay(tmp_path, compilers=()) == made, "it is there already"
