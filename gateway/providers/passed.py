"""Requests that a provider passes on as they came, except for the model's name: head, body, response and failures."""

from __future__ import annotations

from typing import Any

import httpx2
import msgspec

from gateway.core.native_requests import PASSED
from gateway.core.passed_requests import PassedRequest
from gateway.providers.base import Fault, ProviderFailure, UpstreamResponse
from gateway.providers.redaction import Redactor
from gateway.providers.responses import EventStreamResponse
from gateway.providers.sse import UNREADABLE, data_of, is_done, split_frames
from gateway.providers.transport import HTTPResponse
from gateway.providers.upstream_errors import failure_in_body

MAX_ANSWER_BYTES = 64 * 1024 * 1024  # an answer is held until it is complete
UNSUPPORTED_STATUS = 501
_LACKING_STATUSES = frozenset({404, 405, 501})  # with which servers say that they do not have a path
_ABSENT_STATUS = 404


class _Event(msgspec.Struct):
    type: Any = None
    error: Any = None
    message: Any = None


_event = msgspec.json.Decoder(_Event).decode


def form_body(form: tuple[bytes, bytes], model: str) -> bytes:
    """Return a form with the deployment's model name."""
    return form[0] + model.encode() + form[1]


def upstream_path(base_path: bytes, passed: PassedRequest) -> bytes:
    """Return the path at the server. Paths outside /v1 are below the server's root, as for vLLM."""
    root = base_path.removesuffix(b"/v1")
    if root == base_path and passed.path.startswith("/v1/"):  # a base URL such as https://host/openai
        return base_path + passed.path.removeprefix("/v1").encode()
    return root + passed.path.encode()


class PassedResponse(UpstreamResponse):
    """A response of any media type. Its complete body is one chunk."""

    def __init__(self, response: HTTPResponse, *, instead_of_stream: bool = False) -> None:
        """`instead_of_stream`: the client asked for a stream."""
        self.api = PASSED if instead_of_stream else None
        self._response = response
        self._is_read = False
        self.content_type = response.header(b"content-type").decode("latin-1") or "application/octet-stream"

    def ends_stream(self, frames: bytes) -> bool:
        """See `UpstreamResponse.ends_stream`."""
        return True

    async def __anext__(self) -> bytes:
        if self._is_read:
            raise StopAsyncIteration
        self._is_read = True
        try:
            body = await self._response.read_body(MAX_ANSWER_BYTES + 1)
        except httpx2.TransportError as error:
            raise ProviderFailure(Fault.CUT, str(error)) from error
        if len(body) > MAX_ANSWER_BYTES:
            raise ProviderFailure(Fault.MALFORMED, f"the response is longer than {MAX_ANSWER_BYTES} bytes")
        return body

    async def aclose(self) -> None:
        await self._response.aclose()


class PassedStream(EventStreamResponse):
    """A stream of events of any kind. Ends with `[DONE]`, or with the body."""

    api = PASSED

    def __init__(self, response: HTTPResponse, redactor: Redactor) -> None:
        super().__init__(response, redactor)
        self.content_type = response.header(b"content-type").decode("latin-1")

    def ends_stream(self, frames: bytes) -> bool:
        """See `UpstreamResponse.ends_stream`."""
        return self._ended

    def last_chunk(self, frames: bytes) -> bytes:
        """Return the rest of a body that ended cleanly."""
        self._ended = True
        return frames

    def chunk_of(self, frames: bytes) -> bytes:
        """Return the frames, or those before an error. Raises if the first one is an error."""
        passed: list[bytes] = []
        for frame in split_frames(frames):
            data = data_of(frame)
            if (error := _error_of(data)) is not None:
                self._failure = failure_in_body(error, started=self._started or bool(passed), redactor=self._redactor)
                break
            passed.append(frame)
            self._ended = is_done(data)
            if self._ended:
                break
        if self._failure is not None and not passed:
            raise self._failure
        self._started = True
        return b"".join(passed)


def passed_response(passed: PassedRequest, response: HTTPResponse, redactor: Redactor) -> UpstreamResponse:
    """Wrap the response to a passed request: as a stream if the client asked for one and gets one."""
    if passed.stream and response.header(b"content-type").startswith(b"text/event-stream"):
        return PassedStream(response, redactor)
    return PassedResponse(response, instead_of_stream=passed.stream)


def _error_of(data: bytes) -> Any:
    """The error that an event reports, or None. Events need not be JSON."""
    if data.find(b'"error"') < 0:
        return None
    try:
        event = _event(data)
    except UNREADABLE:
        return None
    return (event.error or event.message or "error") if event.type == "error" else event.error


def lacking_path(failure: ProviderFailure, passed: PassedRequest, redactor: Redactor) -> ProviderFailure:
    """Return the failure, as `Fault.UNSUPPORTED` if the server does not have the path.

    The path is the client's choice, so its absence says nothing about the deployment's configuration.
    """
    about_path = failure.fault in (Fault.SETUP, Fault.UNSUPPORTED) or failure.status != _ABSENT_STATUS
    if failure.status not in _LACKING_STATUSES or not about_path:
        return failure
    message = f"the deployment does not serve {passed.path}"
    error = {"message": message, "type": "invalid_request_error", "param": None, "code": "unsupported_operation"}
    return ProviderFailure(
        Fault.UNSUPPORTED,
        message,
        status=UNSUPPORTED_STATUS,
        body=msgspec.json.encode({"error": error}),
        upstream_message=redactor.text(failure.upstream_message),
    )
