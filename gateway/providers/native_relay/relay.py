"""Lets native code pass on the texts of streams, and takes a stream back whenever something else happens.

A stream begins in Python. When a read was one chunk that `DirectText` took, native code adopts the stream: the event
loop stops reading the deployment's socket, and a thread of `relay.c` reads it and writes to the client's. It does what
`DirectText.take` does, in the same order. Whatever it does not know is handed over: the event loop reads the socket
again, and the connection receives the bytes that were read. These are events of another form, a client that reads
slowly, bounds that are reached, the end of the connection and errors.

What was passed on is counted when the stream is released, which happens before anything else is done with the stream:
at the end of `stream_to`, and when one of its connections is lost, which the event loop reports before it closes the
socket. Only time limits need to know more, and ask for the time of the last chunk (`Wait.refresh`).
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from gateway.providers.native_relay.compiler import library_file
from gateway.providers.text_events import DirectText

SHORT_EVENTS = 8  # if native code passed on fewer events, it adopts the stream again after twice as many reads
READS_MAX = 1024  # before an adoption

log = logging.getLogger("warmpath")


class _Passed(ctypes.Structure):
    """`struct Passed` of relay.c."""

    _fields_ = (
        ("since", ctypes.c_double),
        ("events", ctypes.c_int64),
        ("bytes", ctypes.c_int64),
        ("kept_bytes", ctypes.c_int64),
        ("sample_bytes", ctypes.c_int64),
        ("kept", ctypes.c_void_p),
        ("rest_bytes", ctypes.c_int64),
        ("rest_is_counted", ctypes.c_int64),
        ("rest", ctypes.c_void_p),
    )


class Library(NamedTuple):
    """The functions of relay.c. They keep the interpreter's lock, since they are short."""

    open: Any
    close: Any
    news: Any
    next: Any
    adopt: Any
    stop: Any
    release: Any


@cache
def load_library(file: Path) -> Library:
    """Raises `OSError` if the file cannot be loaded."""
    loaded, stream, relay = ctypes.PyDLL(str(file)), ctypes.POINTER(_Passed), ctypes.c_void_p
    count, number, text = ctypes.c_int64, ctypes.c_int, ctypes.c_char_p
    adopt = (relay, count, number, number, text, count, text, count, number, count, count, ctypes.c_double)

    def function(name: str, result: Any, *arguments: Any) -> Any:
        found = loaded[f"warmpath_relay_{name}"]
        found.restype, found.argtypes = result, arguments
        return found

    return Library(
        open=function("open", relay),
        close=function("close", None, relay),
        news=function("news", number, relay),
        next=function("next", count, relay),
        adopt=function("adopt", stream, *adopt),
        stop=function("stop", None, relay, stream),
        release=function("release", None, relay, stream),
    )


class Receiver(Protocol):
    """The connection to a deployment (`gateway.providers.transport.connection.Connection`)."""

    loop: asyncio.AbstractEventLoop
    relayed: RelayedStream | None

    @property
    def is_between_chunks(self) -> bool:
        """Whether the last read ended where a chunk of the transfer coding ended, and everything was passed on."""

    def data_received(self, data: bytes) -> None: ...


def open_relay() -> StreamRelay | None:
    """A relay, or None if the library was not compiled, or cannot be loaded on this machine."""
    try:
        return StreamRelay(load_library(library_file()))
    except OSError as error:
        log.info("streams are relayed in Python, since the native relay is not available: %s", error)
        return None


class StreamRelay:
    """The streams of one event loop that native code passes on. Not thread-safe."""

    def __init__(self, library: Library) -> None:
        self.library = library
        self.streams: dict[int, RelayedStream] = {}
        self.native: int | None = None  # `struct Relay`, opened with the first stream
        self.adopted = 0  # streams so far, each as often as it was adopted
        self._closed = False
        self._loop: asyncio.AbstractEventLoop

    def open(self, loop: asyncio.AbstractEventLoop) -> bool:
        """Start the thread, if it does not run. False: the relay is closed, or the system has no resources left."""
        if self.native is None and not self._closed and (native := self.library.open()):
            self.native, self._loop = native, loop
            loop.add_reader(self.library.news(native), self._take_back)
        return self.native is not None

    def close(self) -> None:
        """Stop the thread. All streams continue in Python."""
        self._closed = True
        for stream in list(self.streams.values()):
            stream.take_back()
        if self.native is not None:
            self._loop.remove_reader(self.library.news(self.native))
            self.library.close(self.native)
            self.native = None

    def add(self, stream: RelayedStream) -> int:
        """Returns the id of a stream that native code adopts next."""
        self.adopted += 1
        self.streams[self.adopted] = stream
        return self.adopted

    def _take_back(self) -> None:
        """Called by the event loop when streams are handed over."""
        while self.native is not None and (handed_over := self.library.next(self.native)):
            self.streams[handed_over].take_back()


class RelayedStream:
    """A stream that native code may pass on, for one call of `Connection.stream_to`, which calls `end`."""

    __slots__ = (
        "_client", "_direct", "_ended", "_id", "_native", "_noted", "_reads", "_reads_needed", "_receiver", "_relay",
        "_transport",
    )  # fmt: skip

    def __init__(
        self, relay: StreamRelay, receiver: Receiver, transport: asyncio.Transport, direct: DirectText
    ) -> None:
        """`transport` is the deployment's connection, of which `receiver` is the protocol."""
        self._relay = relay
        self._receiver = receiver
        self._transport = transport
        self._direct = direct
        self._client = direct.client
        self._id = 0
        self._native: Any = None  # while native code passes the stream on
        self._noted = 0.0  # event-loop seconds of the last chunk, as the time limit knows it
        self._reads = 0  # that `direct` has taken since the last adoption
        self._reads_needed = 1
        self._ended = False

    def read_taken(self) -> None:
        """`direct` has taken what was read. After enough such reads, native code adopts the stream."""
        self._reads += 1
        if self._reads == self._reads_needed:
            self._receiver.loop.call_soon(self._adopt)  # the client's socket then has what was written

    def _adopt(self) -> None:
        """Let native code pass the stream on, if it is in the right state."""
        self._reads = 0
        direct, client, transport = self._direct, self._client, self._transport
        if self._ended or self._native is not None or transport.is_closing() or client.is_closing():
            return
        sockets = _socket_of(transport), _socket_of(client)
        if sockets[0] is None or sockets[1] is None or not self._relay.open(self._receiver.loop):
            self._receiver.relayed = None  # native code cannot pass on this stream
            return
        between = self._receiver.is_between_chunks and direct.begins_frame
        if not between or direct.flow.write_paused or client.get_write_buffer_size():
            self._wait_longer()
            return
        (before, after), received = direct.form, direct.received
        self._id = self._relay.add(self)
        transport.pause_reading()
        self._native = self._relay.library.adopt(
            self._relay.native, self._id, *sockets, before, len(before), after, len(after),
            direct.note_text is not None, received.received, received.sample_max, direct.until,
        ) or None  # fmt: skip
        if self._native is None:
            del self._relay.streams[self._id]
            transport.resume_reading()
            self._wait_longer()
            return
        self._noted = 0.0
        direct.flow.when_lost, direct.wait.refresh = self.take_back, self._note_time

    def _wait_longer(self) -> None:
        self._reads_needed = min(2 * self._reads_needed, READS_MAX)

    def take_back(self) -> None:
        """Continue in Python, with the bytes that were read and not passed on. Idempotent."""
        rest = self._release()
        if not rest:
            return
        receiver = self._receiver
        try:
            receiver.data_received(rest)
        except Exception as error:  # noqa: BLE001 - as the event loop does with an exception of `data_received`
            receiver.loop.call_exception_handler({"message": "a relayed stream failed", "exception": error})
            self._transport.abort()

    def end(self) -> None:
        """End the relaying for good. Drops bytes that were read and not passed on, since no task waits for them."""
        self._release()
        self._ended = True

    def _release(self) -> bytes:
        """Let the event loop read the socket again, and count what native code has passed on. Idempotent.

        Returns the bytes that `data_received` must get next.
        """
        if (native := self._native) is None:
            return b""
        relay, direct, passed = self._relay, self._direct, native.contents
        self._native = direct.flow.when_lost = direct.wait.refresh = None
        relay.library.stop(relay.native, native)
        del relay.streams[self._id]
        self._count(passed)
        if passed.rest_bytes < 0:
            log.error("memory is short: a stream that was relayed is cut")
            self._transport.abort()
        rest = ctypes.string_at(passed.rest, passed.rest_bytes) if passed.rest_bytes > 0 else b""
        if passed.rest_is_counted:
            direct.write(rest)
            rest = b""
        relay.library.release(relay.native, native)
        if not self._transport.is_closing():
            self._transport.resume_reading()
        return rest

    def _count(self, passed: _Passed) -> None:
        """Do what `DirectText.take` does for each event, for all events that were passed on."""
        direct, received = self._direct, self._direct.received
        if passed.events < SHORT_EVENTS:
            self._wait_longer()
        else:
            self._reads_needed = 1
        if passed.since > self._noted:
            direct.wait.since = passed.since
        received.events += passed.events
        received.received += passed.bytes
        if passed.kept_bytes:
            kept = ctypes.string_at(passed.kept, passed.kept_bytes)
            if passed.sample_bytes:
                received.sample.append(kept[: passed.sample_bytes])
            if direct.note_text is not None:
                direct.note_text(kept)

    def _note_time(self) -> None:
        """Called by the time limit before it compares the time of the last chunk (`Wait.refresh`)."""
        if (since := self._native.contents.since) > self._noted:
            self._direct.wait.since = self._noted = since


def _socket_of(transport: asyncio.Transport) -> int | None:
    """The socket's file descriptor. None if there is no socket, or if it carries TLS."""
    found = transport.get_extra_info("socket")
    return None if found is None or transport.get_extra_info("sslcontext") is not None else int(found.fileno())
