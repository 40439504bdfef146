"""The provider for servers with an OpenAI-compatible API. Answers pass unchanged to the client.

`OpenAI.open` builds the request body, sends it through the transport, and checks the response's status and media type.
The response is a `JSONResponse` (one chunk) or an `EventStreamResponse`, which passes on complete frames up to
`[DONE]`. The other providers inherit from these three classes. Most of them only change `body_fields`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import ClassVar

import httpx2
import msgspec

from gateway.core.cache_breakpoints import FIELD, without_breakpoints
from gateway.policy import Deployment, Secret
from gateway.policy.upstream_requests import encoded_query
from gateway.providers.base import Fault, ProviderFailure, Sink, UpstreamResponse
from gateway.providers.passed import PassedResponse, form_body, lacking_path, upstream_path
from gateway.providers.redaction import NOTHING_SECRET, Redactor
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
from gateway.providers.transport import HTTPResponse, HTTPTransport, header_lines
from gateway.providers.upstream_errors import MAX_ERROR_BYTES, failure_in_body, status_failure
from gateway.types import Call, Operation, TokenCounters

MAX_JSON_BYTES = 64 * 1024 * 1024  # longest non-streaming response; embeddings are the longest
HEALTH_TIMEOUT_SECONDS = 2.0  # also for the gateway's other requests that belong to no call
MAX_SHOWN_TYPE_BYTES = 100  # longest quotation of a content-type in an error
DRAIN_TIMEOUT_SECONDS = 1.0  # longest wait for the end of the HTTP message after [DONE]

_FAULTS: tuple[tuple[type[httpx2.TransportError], Fault], ...] = (  # the first match counts; without a match, CUT
    (httpx2.ConnectError, Fault.CONNECT),
    (httpx2.ConnectTimeout, Fault.CONNECT),
    (httpx2.PoolTimeout, Fault.POOL),
    (httpx2.TimeoutException, Fault.TIMEOUT),
    (httpx2.RemoteProtocolError, Fault.MALFORMED),
)

THINKING_BLOCKS = "thinking_blocks"  # field of a message's thinking with Anthropic's signature

_raw = msgspec.json.Encoder()
_messages = msgspec.json.Decoder(list[dict[str, msgspec.Raw]])
_stream_options = msgspec.json.Decoder(dict[str, msgspec.Raw] | None)
_TRUE = msgspec.Raw(b"true")


class OpenAI:
    """Provider for one deployment of a server with an OpenAI-compatible API."""

    has_usage_records = False
    continues_final_message = False

    accepts_deadlines: ClassVar[bool] = False  # whether the server aborts a call at the time in its deadline header
    extra_headers: ClassVar[tuple[tuple[bytes, bytes], ...]] = ()  # sent with every request

    def __init__(
        self, deployment: Deployment, transport: HTTPTransport, resolve_secret: Callable[[Secret], str]
    ) -> None:
        base_url = httpx2.URL(deployment.base_url.rstrip("/"))
        headers = [
            (b"host", base_url.netloc),
            (b"user-agent", b"warmpath"),
            (b"accept-encoding", b"identity"),
            (b"content-type", b"application/json"),
            *self.extra_headers,
        ]
        secrets = []
        if deployment.api_key is not None:
            secrets.append(resolve_secret(deployment.api_key))
            headers.append((b"authorization", b"Bearer " + secrets[0].encode()))
        for name, value in deployment.headers.items():
            headers = [header for header in headers if header[0] != name.lower().encode()]
            if isinstance(value, Secret):
                secrets.append(value := resolve_secret(value))
            headers.append((name.lower().encode(), value.encode()))
        self._redactor = Redactor(*secrets) if secrets else NOTHING_SECRET
        self._transport = transport
        self._pool = transport.pool(base_url, deployment.tls)
        self._base_path = base_url.raw_path.rstrip(b"/")
        self._headers = headers
        self._header_lines = header_lines(headers)
        self._query = encoded_query(deployment.query)
        self._heads = {
            operation: b"POST %b/%b%b HTTP/1.1\r\n%b"
            % (self._base_path, self.path_of(operation), self._query, self._header_lines)
            for operation in Operation
        }
        self._served = deployment.model
        self._model = msgspec.Raw(_raw.encode(deployment.model))
        self._sends_session_id = deployment.kv_events is not None  # KV events then contain each block's call id
        self._omitted_fields = deployment.leave_out
        self._strict_done = deployment.strict_done
        self._usage_options = {"include_usage": _TRUE}
        if deployment.continuous_usage:
            self._usage_options["continuous_usage_stats"] = _TRUE

    @property
    def health_path(self) -> bytes:
        """Return the path that answers with a success status while the server is healthy."""
        return self._base_path + b"/models"

    def path_of(self, operation: Operation) -> bytes:
        """Return the path of an operation, relative to the base URL."""
        return operation.value.encode()

    def unsupported_error(self, call: Call) -> ProviderFailure | None:
        """Return None, because an OpenAI-compatible deployment itself rejects what it does not support."""
        return None

    def render(self, call: Call) -> bytes:
        """Return the request body: the fields of `body_fields` as JSON, or a form that is passed on."""
        if call.passed is not None and call.passed.form is not None:
            return form_body(call.passed.form, self._served)
        return _raw.encode(self.body_fields(call))

    def body_fields(self, call: Call) -> dict[str, msgspec.Raw]:
        """Return the client's top-level fields, with the deployment's model name and a request for usage."""
        fields = self.prompt_fields(call)
        if call.stream:
            fields["stream_options"] = with_stream_options(fields.get("stream_options"), **self._usage_options)
        for name in self._omitted_fields:
            fields.pop(name, None)
        return fields

    def prompt_fields(self, call: Call) -> dict[str, msgspec.Raw]:
        """Return the client's fields with the deployment's model name, without parts that only other APIs support."""
        fields = {**call.fields, "model": self._model}
        if FIELD in call.hints:
            fields = without_breakpoints(fields)
        if call.model.name in call.policy.signing_models and "messages" in fields:
            fields["messages"] = without_thinking_blocks(fields["messages"])
        return fields

    async def open(self, call: Call, *, headers: Mapping[str, str]) -> UpstreamResponse:
        """Send the call, and check the response's status and media type. See `Provider.open`."""
        body = self.render(call)
        named = [*map(": ".join, headers.items())]
        if "\n" in (text := "".join(named)) or "\r" in text:
            raise ValueError(f"a header contains a line break: {headers}")
        lines = "\r\n".join([*named, ""])
        if self.accepts_deadlines:
            left_seconds = call.deadline - asyncio.get_running_loop().time()
            lines += f"x-request-deadline-ms: {max(1, int(left_seconds * 1000))}\r\n"
        if self._sends_session_id:
            lines += f"x-session-id: {call.id}\r\n"
        head = b"%bcontent-length: %d\r\n%b" % (self._head_of(call), len(body), lines.encode("latin-1"))
        try:
            response = await self._transport.send(self._pool, head, body)
        except httpx2.TransportError as error:
            raise _failure(error) from error
        try:
            media_type = b"text/event-stream" if call.stream else b"application/json"
            await _check(response, media_type if call.passed is None else None, self._redactor)
        except BaseException as error:
            await response.aclose()
            if isinstance(error, ProviderFailure):
                if call.passed is not None:
                    error = lacking_path(error, call.passed, self._redactor)
                raise self.translate_error(error) from None
            raise
        return self.response_of(call, response) if call.passed is None else PassedResponse(response)

    def _head_of(self, call: Call) -> bytes:
        """The request line, and the headers that do not depend on the call."""
        if (passed := call.passed) is None:
            return self._heads[call.operation]
        headers = [(name, value) for name, value in self._headers if name != b"content-type"]
        lines = header_lines([*headers, (b"content-type", passed.content_type.encode("latin-1"))])
        return b"POST %b%b HTTP/1.1\r\n%b" % (upstream_path(self._base_path, passed), self._query, lines)

    def response_of(self, call: Call, response: HTTPResponse) -> UpstreamResponse:
        """Wrap an HTTP response with a success status, as an event stream if the call streams, else as JSON."""
        if not call.stream:
            return JSONResponse(response, self._redactor)
        return EventStreamResponse(response, self._redactor, None if self._strict_done else StreamTail(call))

    def translate_error(self, failure: ProviderFailure) -> ProviderFailure:
        """Return the failure with its body translated to OpenAI's format."""
        return failure

    async def healthy(self) -> bool:
        """Send a GET request to the health path. Any success status means healthy."""
        return await self._get(self.health_path) is not None

    async def fetch_models(self) -> bytes:
        """GET the list of models. Raises `ProviderFailure`, as `open` does. There is no timeout."""
        try:
            head = b"GET %b/models HTTP/1.1\r\n%b" % (self._base_path, self._header_lines)
            response = await self._transport.send(self._pool, head, b"")
            try:
                if response.status >= 300:
                    raise await status_failure(response, "application/json", self._redactor)
                return await response.read_body(MAX_JSON_BYTES)
            finally:
                await response.aclose()
        except httpx2.TransportError as error:
            raise _failure(error) from error

    async def recorded_usage(self, call_id: str) -> bytes | None:
        return None  # OpenAI's API has no usage records

    async def count_prompt_tokens(self, call: Call) -> int | None:
        return None

    async def count_text_tokens(self, text: str) -> int | None:
        return None

    async def token_counters(self) -> TokenCounters | None:
        return None

    async def _get(self, path: bytes, max_bytes: int = MAX_ERROR_BYTES) -> bytes | None:
        """GET a body of at most `max_bytes` within HEALTH_TIMEOUT_SECONDS. Returns None without a success status."""
        return await self._request(b"GET %b HTTP/1.1\r\n%b" % (path, self._header_lines), b"", max_bytes)

    async def _post(self, path: bytes, body: bytes, max_bytes: int) -> bytes | None:
        head = b"POST %b HTTP/1.1\r\ncontent-length: %d\r\n%b" % (path, len(body), self._header_lines)
        return await self._request(head, body, max_bytes)

    async def _request(self, head: bytes, body: bytes, max_bytes: int) -> bytes | None:
        try:
            async with asyncio.timeout(HEALTH_TIMEOUT_SECONDS):
                response = await self._transport.send(self._pool, head, body)
                try:
                    content = await response.read_body(
                        max_bytes
                    )  # reads a short body to its end, to keep the connection
                finally:
                    await response.aclose()
        except (httpx2.TransportError, TimeoutError):
            return None
        return content if 200 <= response.status < 300 else None


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
            raise _failure(error) from error
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


class EventStreamResponse(UpstreamResponse):
    """A streamed response. Its chunks are complete event frames, up to and including `[DONE]`.

    Frames in the usual form (see `sse`) pass with unchanged bytes. A stream that ends without its end marker raises
    `Fault.CUT`, unless `tail` shows that the answer is complete; then `[DONE]` is added. If an event is an error or not
    JSON, the frames before it are passed on first, and the failure is raised next.
    """

    end_marker: ClassVar[str] = "[DONE]"  # used in error messages; `is_last` detects the marker

    def __init__(self, response: HTTPResponse, redactor: Redactor, tail: StreamTail | None = None) -> None:
        self._response = response
        self._redactor = redactor
        self._tail = tail
        self._splitter = FrameSplitter(MAX_FRAME_BYTES)
        self._started = False  # whether frames have been passed on
        self._ended = False
        self._failure: ProviderFailure | None = None  # raised after the frames before it have been passed on

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
                return self._last_chunk(self._splitter.rest)
            except httpx2.TransportError as error:
                raise _failure(error) from error
            except FrameTooLong as error:
                raise ProviderFailure(Fault.MALFORMED, str(error)) from error
            chunk = self.chunk_of(frames) if frames else b""
        return chunk

    def _last_chunk(self, frames: bytes) -> bytes:
        """Return the last chunk of a body that ended cleanly. `frames` is a last frame that lacks its blank line."""
        if self.is_last(frames):
            return self.chunk_of(frames)
        if self._tail is not None:
            last = check_frames(frames)
            self._tail.add(last.chunk)
            if not last.malformed and last.error is None and self._tail.is_complete():
                self._ended = True
                return last.chunk + DONE
        raise ProviderFailure(Fault.CUT, f"the stream ended without {self.end_marker}")

    async def stream_to(self, sink: Sink) -> bool:
        """Pass each chunk to `sink` in the callback that received its bytes. See `UpstreamResponse.stream_to`."""
        if self._failure is not None:
            raise self._failure
        if self._ended:
            return True
        split, chunk_of = self._splitter.feed, self.chunk_of

        def pass_on(data: bytes) -> bool:
            frames = split(data)
            chunk = chunk_of(frames) if frames else b""
            if not chunk:
                return True
            return sink(chunk) and not self._ended and self._failure is None

        try:
            body_ended = await self._response.stream_to(pass_on)
        except httpx2.TransportError as error:
            raise _failure(error) from error
        except FrameTooLong as error:
            raise ProviderFailure(Fault.MALFORMED, str(error)) from error
        if self._failure is not None:
            raise self._failure
        if body_ended and not self._ended:
            sink(await anext(self))  # the last frame, which may lack its blank line; raises if there is no frame
        return self._ended

    def is_last(self, frames: bytes) -> bool:
        """Whether the last frame ends the stream. The frame may lack its final blank line."""
        return check_frames(frames).ended

    def chunk_of(self, frames: bytes) -> bytes:
        """Return the frames to pass on: all frames, or those before an error. Raises if the first frame is an error."""
        if are_object_events(frames):
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
            if self._ended:
                async with asyncio.timeout(DRAIN_TIMEOUT_SECONDS):
                    async for _ in self._response:
                        pass
        except (httpx2.TransportError, TimeoutError):
            pass  # the answer was complete; only its connection is lost
        finally:
            await self._response.aclose()


def without_thinking_blocks(messages: msgspec.Raw) -> msgspec.Raw:
    """Return the messages without `thinking_blocks`, Anthropic's signed thinking.

    Compatible servers reject or misread the field. `reasoning_content` also has the text of the thinking, and stays.
    """
    if THINKING_BLOCKS.encode() not in bytes(messages):
        return messages
    decoded = _messages.decode(messages)
    for message in decoded:
        message.pop(THINKING_BLOCKS, None)
    return msgspec.Raw(_raw.encode(decoded))


def with_stream_options(options: msgspec.Raw | None, **ours: msgspec.Raw) -> msgspec.Raw:
    """Add options to the client's `stream_options`. A value that is no object stays, so the deployment rejects it."""
    try:
        decoded = _stream_options.decode(options) if options is not None else None
    except msgspec.DecodeError:
        assert options is not None
        return options
    return msgspec.Raw(_raw.encode({**(decoded or {}), **ours}))


def _check_for_error(body: bytes, redactor: Redactor) -> None:
    """Raise `ProviderFailure` if the body of a successful response reports an error or is not a JSON object."""
    try:
        error = error_value(body)
    except UNREADABLE:
        raise ProviderFailure(Fault.MALFORMED, "the response is not a JSON object") from None
    if error:
        raise failure_in_body(error, started=False, redactor=redactor)


async def _check(response: HTTPResponse, media_type: bytes | None, redactor: Redactor) -> None:
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


def _failure(error: httpx2.TransportError) -> ProviderFailure:
    fault = next((fault for kind, fault in _FAULTS if isinstance(error, kind)), Fault.CUT)
    return ProviderFailure(fault, str(error))
