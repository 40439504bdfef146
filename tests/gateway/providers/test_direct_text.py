"""Events that only add text, passed from one connection to the other without being parsed."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.billing.received_text import SAMPLE_BYTES, ReceivedText
from gateway.providers.base import ProviderFailure
from gateway.providers.redaction import NOTHING_SECRET
from gateway.providers.responses import EventStreamResponse
from gateway.providers.sse import count_events
from gateway.providers.text_events import CODED_FORMS_MAX, DirectText, TextEvents, TextSink
from gateway.providers.transport import HTTPResponse
from gateway.providers.transport.connection import Connection
from gateway.providers.transport.origin_pool import OriginPool
from tests.gateway.endpoints.relayed import cut_at
from tests.gateway.providers.scripted_server import STREAM_HEAD
from tests.gateway.providers.test_text_events import event

DONE = b"data: [DONE]\n\n"
END = b"0\r\n\r\n"


def coded(payload: bytes, size: str = "{:x}") -> bytes:
    """One chunk of the transfer coding. `size` says how its size is written."""
    return size.format(len(payload)).encode() + b"\r\n" + payload + b"\r\n"


class Passed(NamedTuple):
    """What the client got, as payload, and what was counted."""

    payload: bytes
    received: int
    events: int
    sample: str
    failure: str


class _Socket(asyncio.Transport):
    def __init__(self, on_write: Callable[[bytes], None] = lambda data: None) -> None:
        super().__init__()
        self.write = on_write  # type: ignore[assignment, method-assign]

    def is_closing(self) -> bool:
        return False

    def abort(self) -> None: ...


class Relay:
    """Relays a stream from a connection, as `Settlement` and `Upstream` do. `direct.write` notes what it gets."""

    def __init__(self, *, until: float = math.inf, direct: bool = True) -> None:
        self.text = ReceivedText()
        self.got: list[bytes] = []
        self.taken: list[bytes] = []  # by `direct`, as they were read
        self.flow = SimpleNamespace(write_paused=False, when_lost=None)
        self.wait = SimpleNamespace(since=0.0, refresh=None)
        self.direct = DirectText(self.text, self.flow, _Socket(self._write), until) if direct else None
        if self.direct is not None:
            self.direct.wait, self.direct.now = self.wait, lambda: 1.0

    def _write(self, data: bytes) -> None:
        self.taken.append(data)
        self.got.append(data[data.index(b"\r\n") + 2 : -2])

    def _take(self, chunk: bytes) -> bool:
        self.got.append(chunk)
        self.text.add(chunk, count_events(chunk))
        return True

    def _take_text(self, chunk: bytes, events: int) -> bool:
        self.got.append(chunk)
        self.text.add(chunk, events)
        return True

    async def run(self, reads: Sequence[bytes]) -> Passed:
        loop = asyncio.get_running_loop()
        pool = OriginPool("x", 1, None, 1, 1.0)
        pool.take_free_slot()
        connection = Connection(loop, pool)
        connection.connection_made(_Socket())
        sending = asyncio.create_task(connection.send_request(b"", b"", None))
        await asyncio.sleep(0)
        connection.data_received(STREAM_HEAD)
        await sending
        response = EventStreamResponse(HTTPResponse(connection, pool, None), NOTHING_SECRET)
        relaying = asyncio.create_task(response.stream_to(self._take, TextSink(self._take_text, self.direct)))
        await asyncio.sleep(0)
        for read in reads:
            if relaying.done():
                break
            connection.data_received(read)
        failure = ""
        try:
            assert await relaying
        except ProviderFailure as failed:
            failure = str(failed)
        return Passed(b"".join(self.got), self.text.received, self.text.events, self.text.sample_text, failure)


def relayed(relay: Relay, reads: Sequence[bytes]) -> Passed:
    return asyncio.run(relay.run(reads))


def test_the_usual_reads_pass_as_they_are() -> None:
    relay = Relay()
    texts = ["a", " token", "é", 'say "hi"\n', "[DONE]"]
    reads = [coded(event("first")), *(coded(event(text, ascii_only=False)) for text in texts), coded(DONE) + END]
    passed = relayed(relay, reads)
    assert relay.taken == reads[1:-1]
    assert passed == relayed(Relay(direct=False), reads)
    assert relay.wait.since == 1.0


@pytest.mark.parametrize(
    "read",
    [
        coded(event("b".ljust(0xAF - len(event("")))), "{:X}"),
        coded(event("b"), "0{:x}"),
        coded(event("b"), "{:x};name=value"),
        coded(event("b")) + coded(event("c")),
        coded(event("b") + event("c")),
        coded(event("b"))[:-1],
        coded(event("b")[:20]) + coded(event("b")[20:]),
        coded(event("b", usage={"prompt_tokens": 1})),
        coded(event("b").replace(b'"b"', b'"\x01"')),
        coded(event("b").replace(b'"b"', b'"\xff"')),
        coded(event("b").replace(b'"b"', b'"\\"')),
        coded(event("b").replace(b'"b"', b'""')).replace(b"\r\n", b"\n"),
    ],
)
def test_other_reads_take_the_usual_way(read: bytes) -> None:
    relay = Relay()
    reads = [coded(event("a")), read, *([b"\n"] if read[-1:] == b"\r" else []), coded(DONE) + END]
    passed = relayed(relay, reads)
    assert not relay.taken
    assert passed == relayed(Relay(direct=False), reads)


def test_a_read_in_the_middle_of_a_chunk_is_no_chunk() -> None:
    """The payload of a chunk, or the rest of an event, may look like a chunk with an event."""
    inner = coded(event("b"))
    for reads in (
        [coded(event("a")), coded(b": " + inner.replace(b"\r\n", b"\n") + b"\n\n")],
        [coded(event("a")), b"%x\r\n" % (len(inner) + 4), inner, b": \n\n\r\n"],
        [coded(event("a")), coded(event("a")[:-1]), inner, coded(b"\n")],
        [coded(event("a")), b"%x\r\n" % len(event("b") + inner) + event("b"), inner, b"\r\n"],
    ):
        relay = Relay()
        passed = relayed(relay, [*reads, coded(DONE) + END])
        assert not relay.taken
        assert passed == relayed(Relay(direct=False), [*reads, coded(DONE) + END])


def test_nothing_is_taken_while_the_client_does_not_read_or_the_ledger_is_due() -> None:
    reads = [coded(event("a")), *[coded(event("b"))] * 3, coded(DONE) + END]
    due = Relay(until=len(event("a")) + 2 * len(event("b")))
    relayed(due, reads)
    assert len(due.taken) == 1
    slow = Relay()
    slow.flow.write_paused = True
    relayed(slow, reads)
    assert not slow.taken


def test_the_answer_is_recorded_if_it_may_be_resumed() -> None:
    relay, noted = Relay(), list[bytes]()
    assert relay.direct is not None
    relay.direct.note_text = noted.append
    events = [event(f"token {number}") for number in range(3 * SAMPLE_BYTES // len(event("token 1")))]
    relayed(relay, [*map(coded, events), coded(DONE) + END])
    assert noted == events[1:]


def test_the_forms_that_are_kept_are_bounded() -> None:
    texts = TextEvents()
    texts.learn(event("a"))
    for size in range(3 * CODED_FORMS_MAX):
        texts.add_coded_form(size)
        assert len(texts.coded_forms) <= CODED_FORMS_MAX


@pytest.mark.parametrize("length", [1, 14, 15, 16, 17, 254, 255, 256, 257, 4094, 4095, 4096, 4097, 70_000])
def test_the_size_of_a_chunk_is_found_at_any_length(length: int) -> None:
    texts = TextEvents()
    frame = event("a")
    texts.learn(frame)
    payload = event("b" * max(1, length - len(event(""))))
    chunk = coded(payload)
    before, start, after, end, payload_bytes = texts.add_coded_form(len(chunk))
    assert chunk[:start] == before and chunk[end:] == after and payload_bytes == len(payload)


def test_a_size_that_no_chunk_has_has_no_form() -> None:
    texts = TextEvents()
    texts.learn(event("a"))
    sizes = {len(coded(b"x" * length)) for length in range(1, 70_000)}
    for size in (*range(20), *range(100, 5_000)):
        if size not in sizes:
            assert texts.add_coded_form(size)[0] == b"\0"


EVENTS = st.sampled_from(
    [
        *[
            event(text, ascii_only=False)
            for text in (" a", "b", "c" * 40, "", "é", '"', "[DONE]", "\r\n5\r\nabcde\r\n")
        ],
        event(" b", compact=True),
        event("d", usage={"prompt_tokens": 3, "completion_tokens": 4}),
        b": ping\n\n",
        b'data: {"choices": [], "usage": {"prompt_tokens": 3}}\n\n',
        event("e").replace(b"\n", b"\r\n"),
        b"data: {not JSON}\n\n",
        b'data: {"error": {"message": "failed"}}\n\n',
    ]
)
SIZES = st.sampled_from(["{:x}"] * 6 + ["{:X}", "0{:x}", "{:x};x=y"])


@given(
    st.lists(st.tuples(EVENTS, SIZES, st.sampled_from([1, 1, 1, 2, 0])), max_size=16),
    st.lists(st.integers(0, 3000), max_size=6),
    st.booleans(),
)
def test_any_stream_in_any_reads_is_relayed_as_without_it(
    sent: list[tuple[bytes, str, int]], offsets: list[int], one_by_one: bool
) -> None:
    """The number says how many chunks an event fills; 0: it shares one with the next event."""
    chunks: list[bytes] = []
    joined = b""
    for frame, size, parts in sent:
        joined += frame
        if parts == 1:
            chunks.append(coded(joined, size))
        elif parts == 2:
            chunks += [coded(joined[:9], size), coded(joined[9:], size)]
        joined = joined if parts == 0 else b""
    chunks.append(coded(joined + DONE) + END)
    reads = chunks if one_by_one else cut_at(b"".join(chunks), offsets)
    assert relayed(Relay(), reads) == relayed(Relay(direct=False), reads)
