"""The responses of OpenAI-compatible servers, a JSON body or a stream of events, from which other providers inherit.

`check_response` checks the status and the media type of an HTTP response. `JSONResponse` yields one chunk.
`EventStreamResponse` passes on complete frames up to `[DONE]`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

import httpx2

from gateway.providers.base import Fault, ProviderFailure, Sink, UpstreamResponse
from gateway.providers.redaction import Redactor
from gateway.providers.sse import (
    DONE,
    MAX_FRAME_BYTES,
    UNREADABLE,
    FrameSplitter,
    FrameTooLong,
    are_object_events,
    check_frames,
    error_value,
    is_utf8,
)
from gateway.providers.stream_tail import CHUNK_MAX_BYTES, StreamTail
from gateway.providers.text_events import DirectText, TextEvents, TextSink
from gateway.providers.transport import HTTPResponse
from gateway.providers.upstream_errors import MAX_ERROR_BYTES, failure_in_body, status_failure

MAX_JSON_BYTES = 64 * 1024 * 1024  # longest non-streaming response; embeddings are the longest
MAX_SHOWN_TYPE_BYTES = 100  # longest quotation of a content-type in an error
DRAIN_TIMEOUT_SECONDS = 1.0  # longest wait for the end of the HTTP message after [DONE]

_FAULTS: tuple[tuple[type[httpx2.TransportError], Fault], ...] = (  # the first match counts; without a match, CUT
    (httpx2.ConnectError, Fault.CONNECT),
    (httpx2.ConnectTimeout, Fault.CONNECT),
    (httpx2.PoolTimeout, Fault.POOL),
    (httpx2.TimeoutException, Fault.TIMEOUT),
    (httpx2.RemoteProtocolError, Fault.MALFORMED),
)


class JSONResponse(UpstreamResponse):
    """A non-streaming response. Its complete body is one chunk."""

    def __init__(self, response: HTTPResponse, redactor: Redactor) -> None:
        self._response = response
        self._redactor = redactor
        self._is_read = False

    async def __anext__(self) -> bytes:
        if self._is_read:
            raise StopAsyncIteration
        self._is_read = True
        try:
            body = await self._response.read_body(MAX_JSON_BYTES + 1)
        except httpx2.TransportError as error:
            raise transport_failure(error) from error
        if len(body) > MAX_JSON_BYTES:
            raise ProviderFailure(Fault.MALFORMED, f"the response is longer than {MAX_JSON_BYTES} bytes")
        # A body without content-length ends with the connection, so HTTP does not detect that the body was cut.
        if not (body[:64].lstrip().startswith(b"{") and body[-64:].rstrip().endswith(b"}")):
            raise ProviderFailure(Fault.MALFORMED, "the response is not a complete JSON object")
        if not is_utf8(body):
            raise ProviderFailure(Fault.MALFORMED, "the response is not UTF-8")
        if len(body) <= MAX_ERROR_BYTES:  # a longer body is not an error, and parsing embeddings twice takes long
            _check_for_error(body, self._redactor)
        return body

    async def aclose(self) -> None:
        await self._response.aclose()


class Splitter(Protocol):
    """Splits a stream into complete frames, as `FrameSplitter` does."""

    def feed(self, data: bytes) -> bytes: ...

    @property
    def rest(self) -> bytes: ...


class EventStreamResponse(UpstreamResponse):
    """A streamed response. Its chunks are complete event frames, up to and including `[DONE]`.

    Frames in the usual form (see `sse`) pass with unchanged bytes. A stream that ends without its end marker raises
    `Fault.CUT`, unless `tail` shows that the answer is complete; then `[DONE]` is added. If an event is an error or not
    JSON, the frames before it are passed on first, and the failure is raised next.
    """

    def __init__(
        self,
        response: HTTPResponse,
        redactor: Redactor,
        tail: StreamTail | None = None,
        splitter: Callable[[int], Splitter] = FrameSplitter,
    ) -> None:
        """`splitter` makes what splits the body into frames of at most so many bytes: by default, into events."""
        self._response = response
        self._redactor = redactor
        self._tail = tail
        self._splitter = splitter(MAX_FRAME_BYTES)
        self._started = False  # whether frames have been passed on
        self._ended = False
        self._failure: ProviderFailure | None = None  # raised after the frames before it have been passed on
        self._texts = TextEvents()

    async def __anext__(self) -> bytes:
        if self._failure is not None:
            raise self._failure
        if self._ended:
            raise StopAsyncIteration
        chunk = b""
        while not chunk:
            try:
                frames = self._splitter.feed(await anext(self._response))
            except StopAsyncIteration:
                return self.last_chunk(self._splitter.rest)
            except httpx2.TransportError as error:
                raise transport_failure(error) from error
            except FrameTooLong as error:
                raise ProviderFailure(Fault.MALFORMED, str(error)) from error
            chunk = self.chunk_of(frames) if frames else b""
        return chunk

    def last_chunk(self, frames: bytes) -> bytes:
        """Return the last chunk of a body that ended cleanly. `frames` is a last frame that lacks its blank line."""
        last = check_frames(frames)
        if last.ended:
            return self.chunk_of(frames)
        if self._tail is not None:
            self._tail.add(last.chunk)
            if not last.malformed and last.error is None and self._tail.is_complete():
                self._ended = True
                return last.chunk + DONE
        raise ProviderFailure(Fault.CUT, "the stream ended without [DONE]")

    async def stream_to(self, sink: Sink, text_sink: TextSink | None = None) -> bool:
        """Pass each chunk to a sink in the callback that received its bytes. See `UpstreamResponse.stream_to`."""
        if self._failure is not None:
            raise self._failure
        if self._ended:
            return True
        try:
            if type(self).chunk_of is not EventStreamResponse.chunk_of:  # another class reads events of another form
                text_sink = None
            direct = None if text_sink is None else text_sink.direct
            receiver = self._receiver(sink, text_sink, direct)
            body_ended = await self._response.stream_to(receiver, direct)
        except httpx2.TransportError as error:
            raise transport_failure(error) from error
        except FrameTooLong as error:
            raise ProviderFailure(Fault.MALFORMED, str(error)) from error
        if self._failure is not None:
            raise self._failure
        if body_ended and not self._ended:
            sink(await anext(self))  # the last frame, which may lack its blank line; raises if there is no frame
        return self._ended

    def _receiver(self, sink: Sink, text_sink: TextSink | None, direct: DirectText | None) -> Sink:
        """Return the function that gets the bytes of the body as they arrive, for `stream_to`."""
        splitter, chunk_of, texts = self._splitter, self.chunk_of, self._texts
        take_text = None if text_sink is None else text_sink.take
        begins_frame = not splitter.rest  # whether the next bytes begin a frame
        if direct is not None:
            direct.use(texts, begins_frame=begins_frame)

        def pass_on(data: bytes) -> bool:
            nonlocal begins_frame
            if take_text is not None and begins_frame and (events := texts.count(data)):
                return take_text(data, events)
            frames = splitter.feed(data)
            begins_frame = frames is data or not splitter.rest
            if direct is not None:
                direct.begins_frame = begins_frame
            chunk = chunk_of(frames) if frames else b""
            if not chunk:
                return True
            if take_text is not None and chunk is frames and not self._ended:
                texts.learn(chunk)
            return sink(chunk) and not self._ended and self._failure is None

        return pass_on

    def chunk_of(self, frames: bytes) -> bytes:
        """Return the frames to pass on: all frames, or those before an error. Raises if the first frame is an error."""
        if frames[-len(DONE) :] != DONE and are_object_events(frames):
            self._started = True
            if (tail := self._tail) is not None:
                (tail.add_short if len(frames) <= CHUNK_MAX_BYTES else tail.add)(frames)
            return frames
        checked = check_frames(frames)
        if checked.malformed:
            self._failure = ProviderFailure(Fault.MALFORMED, "an event of the stream is not JSON in UTF-8")
        elif checked.error is not None:
            self._failure = failure_in_body(
                checked.error, started=self._started or bool(checked.chunk), redactor=self._redactor
            )
        if self._failure is not None and not checked.chunk:
            raise self._failure
        self._started = True
        self._ended = checked.ended
        if self._tail is not None:
            self._tail.add(checked.chunk)
        return checked.chunk

    async def aclose(self) -> None:
        """Close the response. After `[DONE]`, first wait for the end of the HTTP message, to keep the connection."""
        try:
            if self._ended and not self._response.has_arrived:
                async with asyncio.timeout(DRAIN_TIMEOUT_SECONDS):
                    async for _ in self._response:
                        pass
        except (httpx2.TransportError, TimeoutError):
            pass  # the answer was complete; only its connection is lost
        finally:
            await self._response.aclose()


def _check_for_error(body: bytes, redactor: Redactor) -> None:
    """Raise `ProviderFailure` if the body of a successful response reports an error or is not a JSON object."""
    try:
        error = error_value(body)
    except UNREADABLE:
        raise ProviderFailure(Fault.MALFORMED, "the response is not a JSON object") from None
    if error:
        raise failure_in_body(error, started=False, redactor=redactor)


async def check_response(response: HTTPResponse, media_type: bytes | None, redactor: Redactor) -> None:
    """Raise `ProviderFailure` unless the response has a success status and the requested media type (None: any)."""
    content_type = response.header(b"content-type")
    if response.status >= 300:
        raise await status_failure(response, content_type.decode("latin-1"), redactor)
    if media_type not in (None, content_type) and content_type.partition(b";")[0].strip().lower() != media_type:
        named = redactor.text(content_type[:MAX_SHOWN_TYPE_BYTES].decode("latin-1"))
        message = f"content-type {named!r} instead of {(media_type or b'').decode()}"
        raise ProviderFailure(Fault.MALFORMED, message, status=response.status)
    if response.header(b"content-encoding").lower() not in (b"", b"identity"):
        message = "the response is compressed, although identity encoding was requested"
        raise ProviderFailure(Fault.MALFORMED, message, status=response.status)


def transport_failure(error: httpx2.TransportError) -> ProviderFailure:
    fault = next((fault for kind, fault in _FAULTS if isinstance(error, kind)), Fault.CUT)
    return ProviderFailure(fault, str(error))
