"""Servers that speak OpenAI's dialect, which is the doors' own: bytes pass untouched in both directions."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import ClassVar

import httpx2
import msgspec

from gateway.core.cache_breakpoints import FIELD, without_breakpoints
from gateway.policy import Deployment, EnvSecret
from gateway.providers.base import Fault, ProviderFailure, Sink, UpstreamResponse
from gateway.providers.sse import (
    MAX_FRAME_BYTES,
    FrameSplitter,
    FrameTooLong,
    ends_stream,
    error_value,
    find_error,
    first_malformed_at,
    is_single_object_event,
)
from gateway.providers.transport import HTTPResponse, HTTPTransport, header_lines
from gateway.providers.upstream_errors import MAX_ERROR_BYTES, failure_in_body, status_failure
from gateway.types import Call, Operation, TokenCounters

MAX_JSON_BYTES = 64 * 1024 * 1024  # of an answer that does not stream: embeddings are the long ones
HEALTH_TIMEOUT_SECONDS = 2.0
DRAIN_TIMEOUT_SECONDS = 1.0  # from [DONE] to the end of the HTTP message

_FAULTS: tuple[tuple[type[httpx2.TransportError], Fault], ...] = (  # the first that fits
    (httpx2.ConnectError, Fault.CONNECT),
    (httpx2.ConnectTimeout, Fault.CONNECT),
    (httpx2.PoolTimeout, Fault.POOL),
    (httpx2.TimeoutException, Fault.TIMEOUT),
    (httpx2.RemoteProtocolError, Fault.MALFORMED),
)

SIGNED = "thinking_blocks"  # of a message

_raw = msgspec.json.Encoder()
_messages = msgspec.json.Decoder(list[dict[str, msgspec.Raw]])
_stream_options = msgspec.json.Decoder(dict[str, msgspec.Raw] | None)
_TRUE = msgspec.Raw(b"true")


class OpenAI:
    """One deployment of any server that answers as OpenAI does."""

    has_usage_records = False
    continues_final_message = False

    knows_deadlines: ClassVar[bool] = False  # and stops working when the call's has passed
    own_headers: ClassVar[tuple[tuple[bytes, bytes], ...]] = ()  # that its dialect wants with every request

    def __init__(
        self, deployment: Deployment, transport: HTTPTransport, resolve_secret: Callable[[EnvSecret], str]
    ) -> None:
        base_url = httpx2.URL(deployment.base_url.rstrip("/"))
        headers = [
            (b"host", base_url.netloc),
            (b"user-agent", b"warmpath"),
            (b"accept-encoding", b"identity"),
            (b"content-type", b"application/json"),
            *self.own_headers,
        ]
        if deployment.api_key is not None:
            headers.append((b"authorization", b"Bearer " + resolve_secret(deployment.api_key).encode()))
        self._transport = transport
        self._origin = transport.pool(base_url)
        self._base_path = base_url.raw_path.rstrip(b"/")
        self._header_lines = header_lines(headers)
        self._heads = {
            operation: b"POST %b/%b HTTP/1.1\r\n%b" % (self._base_path, self.path_of(operation), self._header_lines)
            for operation in Operation
        }
        self._served = deployment.model
        self._model = msgspec.Raw(_raw.encode(deployment.model))
        self._names_calls = deployment.kv_events is not None  # its events then say which call's blocks they tell of
        self._left_out = deployment.leave_out
        self._usage_options = {"include_usage": _TRUE}
        if deployment.continuous_usage:
            self._usage_options["continuous_usage_stats"] = _TRUE

    @property
    def health_path(self) -> bytes:
        return self._base_path + b"/models"

    def path_of(self, operation: Operation) -> bytes:
        """Behind the base URL."""
        return operation.value.encode()

    def unsupported_error(self, call: Call) -> ProviderFailure | None:
        return None  # what such a server can not do, it says itself

    def render(self, call: Call) -> bytes:
        return _raw.encode(self.fields(call))

    def fields(self, call: Call) -> dict[str, msgspec.Raw]:
        """The body's top-level fields: the client's, but for the model, and for the usage that we always meter by."""
        fields = self.heard(call)
        if call.stream:
            fields["stream_options"] = with_options(fields.get("stream_options"), **self._usage_options)
        for name in self._left_out:
            fields.pop(name, None)
        return fields

    def heard(self, call: Call) -> dict[str, msgspec.Raw]:
        """The call's fields without what is in them for a server of another dialect alone."""
        fields = {**call.fields, "model": self._model}
        if FIELD in call.hints:
            fields = without_breakpoints(fields)
        if call.model.name in call.policy.signing_models and "messages" in fields:
            fields["messages"] = without_signed(fields["messages"])
        return fields

    async def open(self, call: Call, *, headers: Mapping[str, str]) -> UpstreamResponse:
        body = self.render(call)
        named = [*map(": ".join, headers.items())]
        if "\n" in (text := "".join(named)) or "\r" in text:
            raise ValueError(f"a header would break out of its line: {headers}")
        lines = "\r\n".join([*named, ""])
        if self.knows_deadlines:
            left_seconds = call.deadline - asyncio.get_running_loop().time()
            lines += f"x-request-deadline-ms: {max(1, int(left_seconds * 1000))}\r\n"
        if self._names_calls:
            lines += f"x-session-id: {call.id}\r\n"
        head = b"%bcontent-length: %d\r\n%b" % (self._heads[call.operation], len(body), lines.encode("latin-1"))
        try:
            answer = await self._transport.send(self._origin, head, body)
        except httpx2.TransportError as error:
            raise _failure(error) from error
        try:
            await _check(answer, b"text/event-stream" if call.stream else b"application/json")
        except BaseException as error:
            await answer.aclose()
            if isinstance(error, ProviderFailure):
                raise self.in_our_words(error) from None
            raise
        return self.reply(call, answer)

    def reply(self, call: Call, answer: HTTPResponse) -> UpstreamResponse:
        return EventStreamResponse(answer) if call.stream else JSONResponse(answer)

    def in_our_words(self, failure: ProviderFailure) -> ProviderFailure:
        """A bad status, with its body in the doors' dialect."""
        return failure

    async def healthy(self) -> bool:
        return await self._get(self.health_path) is not None

    async def recorded_usage(self, call_id: str) -> bytes | None:
        return None  # this dialect has no such question

    async def count_prompt_tokens(self, call: Call) -> int | None:
        return None

    async def token_counters(self) -> TokenCounters | None:
        return None

    async def _get(self, path: bytes, max_bytes: int = MAX_ERROR_BYTES) -> bytes | None:
        """A body of at most `max_bytes`, within HEALTH_TIMEOUT_SECONDS; None unless the status is good."""
        return await self._ask(b"GET %b HTTP/1.1\r\n%b" % (path, self._header_lines), b"", max_bytes)

    async def _post(self, path: bytes, body: bytes, max_bytes: int) -> bytes | None:
        head = b"POST %b HTTP/1.1\r\ncontent-length: %d\r\n%b" % (path, len(body), self._header_lines)
        return await self._ask(head, body, max_bytes)

    async def _ask(self, head: bytes, body: bytes, max_bytes: int) -> bytes | None:
        try:
            async with asyncio.timeout(HEALTH_TIMEOUT_SECONDS):
                answer = await self._transport.send(self._origin, head, body)
                try:
                    told = await answer.rest(max_bytes)  # to its end where it is short, to keep the connection
                finally:
                    await answer.aclose()
        except (httpx2.TransportError, TimeoutError):
            return None
        return told if 200 <= answer.status < 300 else None


class JSONResponse(UpstreamResponse):
    """An answer that does not stream: its whole body as the one chunk."""

    def __init__(self, answer: HTTPResponse) -> None:
        self._answer = answer
        self._given = False

    async def __anext__(self) -> bytes:
        if self._given:
            raise StopAsyncIteration
        self._given = True
        try:
            body = await self._answer.rest(MAX_JSON_BYTES + 1)
        except httpx2.TransportError as error:
            raise _failure(error) from error
        if len(body) > MAX_JSON_BYTES:
            raise ProviderFailure(Fault.MALFORMED, f"the answer is longer than {MAX_JSON_BYTES} bytes")
        # A body whose only end is that of its connection can be cut without HTTP noticing.
        if not (body[:64].lstrip().startswith(b"{") and body[-64:].rstrip().endswith(b"}")):
            raise ProviderFailure(Fault.MALFORMED, "the answer is not a whole JSON object")
        if len(body) <= MAX_ERROR_BYTES:  # what is longer is no error, and to read embeddings twice takes its time
            _check_said(body)
        return body

    async def aclose(self) -> None:
        await self._answer.aclose()


class EventStreamResponse(UpstreamResponse):
    """A streamed answer: whole event frames, byte for byte, up to and including `[DONE]`."""

    end: ClassVar[str] = "[DONE]"

    def __init__(self, answer: HTTPResponse) -> None:
        self._answer = answer
        self._splitter = FrameSplitter(MAX_FRAME_BYTES)
        self._begun = False  # something of the answer was passed on
        self._ended = False
        self._failure: ProviderFailure | None = None  # behind the frames that came with it

    async def __anext__(self) -> bytes:
        if self._failure is not None:
            raise self._failure
        if self._ended:
            raise StopAsyncIteration
        given = b""
        while not given:
            try:
                frames = self._splitter.feed(await anext(self._answer))
            except StopAsyncIteration:
                frames = self._splitter.rest
                if not self.ends_with(frames):
                    raise ProviderFailure(Fault.CUT, f"the stream ended without {self.end}") from None
            except httpx2.TransportError as error:
                raise _failure(error) from error
            except FrameTooLong as error:
                raise ProviderFailure(Fault.MALFORMED, str(error)) from error
            given = self.checked(frames) if frames else b""
        return given

    async def stream_to(self, sink: Sink) -> bool:
        if self._failure is not None:
            raise self._failure
        if self._ended:
            return True
        split, checked = self._splitter.feed, self.checked

        def pass_on(data: bytes) -> bool:
            frames = split(data)
            given = checked(frames) if frames else b""
            if not given:
                return True
            wants_more = sink(given)
            return wants_more and not self._ended and self._failure is None

        try:
            body_ended = await self._answer.stream_to(pass_on)
        except httpx2.TransportError as error:
            raise _failure(error) from error
        except FrameTooLong as error:
            raise ProviderFailure(Fault.MALFORMED, str(error)) from error
        if self._failure is not None:
            raise self._failure
        if body_ended and not self._ended:
            sink(await anext(self))  # the last frame, which may lack its blank line; or the failure to end
        return self._ended

    def ends_with(self, frames: bytes) -> bool:
        """Whether the last of them ends the stream; it may lack its blank line."""
        return ends_stream(frames)

    def checked(self, frames: bytes) -> bytes:
        """The frames up to an error that the server tells of, which is raised when they are through."""
        if is_single_object_event(frames):
            self._begun = True
            return frames
        if (offset := first_malformed_at(frames)) is not None:
            self._failure = ProviderFailure(Fault.MALFORMED, "an event of the stream is not JSON")
            if offset == 0:
                raise self._failure
            return frames[:offset]
        if (error_at := find_error(frames)) is not None:
            offset, error = error_at
            self._failure = failure_in_body(error, begun=self._begun or offset > 0)
            if offset == 0:
                raise self._failure
            return frames[:offset]
        self._begun = True
        self._ended = ends_stream(frames)
        return frames

    async def aclose(self) -> None:
        """Behind `[DONE]` this waits for the end of the HTTP message: without it the connection can not be kept."""
        try:
            if self._ended:
                async with asyncio.timeout(DRAIN_TIMEOUT_SECONDS):
                    async for _ in self._answer:
                        pass
        except (httpx2.TransportError, TimeoutError):
            pass  # the answer was whole before; only its connection is lost
        finally:
            await self._answer.aclose()


def without_signed(messages: msgspec.Raw) -> msgspec.Raw:
    """Without the thinking that a server of Anthropic's has signed (`thinking_blocks`), which others refuse, or read as
    something that it is not. `reasoning_content` has its text.
    """
    if SIGNED.encode() not in bytes(messages):
        return messages
    said = _messages.decode(messages)
    for message in said:
        message.pop(SIGNED, None)
    return msgspec.Raw(_raw.encode(said))


def with_options(options: msgspec.Raw | None, **ours: msgspec.Raw) -> msgspec.Raw:
    """The client's `stream_options` with ours added; left as it is where it is no object, for the server to refuse."""
    try:
        given = _stream_options.decode(options) if options is not None else None
    except msgspec.DecodeError:
        assert options is not None
        return options
    return msgspec.Raw(_raw.encode({**(given or {}), **ours}))


def _check_said(body: bytes) -> None:
    """Raises where a body tells of a failure, or is no JSON."""
    try:
        error = error_value(body)
    except (msgspec.MsgspecError, RecursionError):
        raise ProviderFailure(Fault.MALFORMED, "the answer is not a JSON object") from None
    if error:
        raise failure_in_body(error, begun=False)


async def _check(answer: HTTPResponse, media_type: bytes) -> None:
    """Raises unless the answer is what was asked for."""
    content_type = answer.header(b"content-type")
    if answer.status >= 300:
        raise await status_failure(answer, content_type.decode("latin-1"))
    if content_type != media_type and content_type.partition(b";")[0].strip().lower() != media_type:
        message = f"content-type {content_type.decode('latin-1')!r} instead of {media_type.decode()}"
        raise ProviderFailure(Fault.MALFORMED, message, status=answer.status)
    if answer.header(b"content-encoding").lower() not in (b"", b"identity"):
        message = "the answer is compressed, although identity was asked for"
        raise ProviderFailure(Fault.MALFORMED, message, status=answer.status)


def _failure(error: httpx2.TransportError) -> ProviderFailure:
    fault = next((fault for kind, fault in _FAULTS if isinstance(error, kind)), Fault.CUT)
    return ProviderFailure(fault, str(error))
