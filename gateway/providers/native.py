"""Requests and answers in the client's own API format, for deployments that have it: bytes pass unchanged.

The gateway replaces only the model's name. It reads from an answer what routing and metering need: which events have
output, which one ends the stream, and which one reports an error.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from gateway.core.errors import BadRequest
from gateway.core.native_requests import NativeRequest
from gateway.providers.base import Fault, ProviderFailure
from gateway.providers.native_formats import NATIVE_APIS, NativeAPI
from gateway.providers.redaction import Redactor
from gateway.providers.responses import EventStreamResponse
from gateway.providers.sse import UNREADABLE, data_of, is_done, is_utf8, split_frames
from gateway.providers.transport import HTTPResponse
from gateway.providers.upstream_errors import failure_in_body
from gateway.providers.usage.base import TokenCount
from gateway.types import Call

FILE_URL = b'"file_url":'  # of a file in a translated request
_LISTS = ("anthropic-beta",)  # headers with a list, to which the policy's own entries are added


class _Response(msgspec.Struct):
    error: Any = None


class _Event(msgspec.Struct):
    type: str = ""
    error: Any = None
    response: _Response | None = None

    def failure(self, data: bytes) -> Any:
        """The error that the event reports, or None."""
        if self.type == "error":  # OpenAI puts the error's fields beside the type
            return self.error or {name: value for name, value in _object(data).items() if name != "type"}
        if self.type == "response.failed":
            return (self.response.error if self.response is not None else None) or "the response failed"
        return None


class _CountedPrompt(msgspec.Struct):
    input_tokens: TokenCount


_token_count = msgspec.json.Decoder(_CountedPrompt).decode
_event = msgspec.json.Decoder(_Event).decode
_object = msgspec.json.Decoder(dict[str, Any]).decode


def native_body(fields: Mapping[str, msgspec.Raw], model: msgspec.Raw) -> dict[str, msgspec.Raw]:
    """Return the client's fields in their order, with the deployment's model name."""
    return {**fields, "model": model}


def native_headers(headers: Iterable[tuple[bytes, bytes]], native: NativeRequest) -> list[tuple[bytes, bytes]]:
    """Return the deployment's headers with those that the client's request passes on. Lists of both are joined."""
    merged = dict(headers)
    for name, value in native.headers:
        key, given = name.encode(), value.encode("latin-1")
        merged[key] = b"%b,%b" % (merged[key], given) if name in _LISTS and key in merged else given
    return list(merged.items())


def counted_tokens(answer: bytes | None) -> int | None:
    """The tokens that an endpoint counted. None if there is no answer, or another one."""
    try:
        return None if answer is None else _token_count(answer).input_tokens
    except UNREADABLE:
        return None


def has_native_output(api: NativeAPI, frames: bytes) -> bool:
    """Whether frames contain more than the events and comments before the first output."""
    for frame in split_frames(frames):
        if data := data_of(frame):
            try:
                if _event(data).type not in api.opening:
                    return True
            except UNREADABLE:
                return True
    return False


class NativeStream(EventStreamResponse):
    """A stream whose events pass unchanged, up to the one that ends the answer."""

    def __init__(self, response: HTTPResponse, redactor: Redactor, api: str) -> None:
        super().__init__(response, redactor)
        self.api = api
        self._format = NATIVE_APIS[api]

    def has_output(self, frames: bytes) -> bool:
        """See `UpstreamResponse.has_output`."""
        return has_native_output(self._format, frames)

    def ends_stream(self, frames: bytes) -> bool:
        """See `UpstreamResponse.ends_stream`."""
        return self._ended

    def last_chunk(self, frames: bytes) -> bytes:
        """Return the last chunk of a body that ended cleanly. `frames` is a last frame that lacks its blank line."""
        chunk = self.chunk_of(frames) if frames.strip() else b""
        if not self._ended and self._failure is None:
            raise ProviderFailure(Fault.CUT, f"the stream ended without {' or '.join(sorted(self._format.ends))}")
        return chunk

    def chunk_of(self, frames: bytes) -> bytes:
        """Return the frames to pass on: all up to the end of the answer, or those before an error."""
        passed: list[bytes] = []
        if not is_utf8(frames):
            self._failure = ProviderFailure(Fault.MALFORMED, "an event of the stream is not UTF-8")
        for frame in split_frames(frames) if self._failure is None else ():
            data = data_of(frame)
            if data and is_done(data):
                continue  # which some servers add although the API has none
            if data and not self._pass_event(data):
                break
            passed.append(frame)
            if self._ended:
                break
        if self._failure is not None and not passed:
            raise self._failure
        return b"".join(passed)

    def _pass_event(self, data: bytes) -> bool:
        """Note what an event says. Returns False if it does not pass, because it is malformed or an error."""
        try:
            event = _event(data)
            failure = event.failure(data)
        except UNREADABLE:
            self._failure = ProviderFailure(Fault.MALFORMED, "an event of the stream is not a JSON object")
            return False
        if failure is not None:
            self._failure = failure_in_body(failure, started=self._started, redactor=self._redactor)
            return False
        self._started = self._started or event.type not in self._format.opening
        self._ended = event.type in self._format.ends
        return True


def refused(call: Call) -> ProviderFailure | None:
    """Return the error for a call that can be sent only to a deployment of the client's API."""
    if call.native is None or call.native.refusal is None:
        return None
    refusal = call.native.refusal
    return ProviderFailure(
        Fault.REFUSED,
        refusal.message,
        status=refusal.status,
        body=msgspec.json.encode({"error": refusal.body()}),
        log_message="the request cannot be translated to the deployment's API",
    )


def file_url_error(call: Call) -> ProviderFailure | None:
    """Return the error for a translated request with a file by URL, because OpenAI's chats take only a file's data."""
    if call.media is None or not call.hints or FILE_URL not in bytes(call.fields.get("messages", b"")):
        return None
    message = (
        "messages: this model's server takes no files by URL, and the gateway fetches none unless media_fetch.hosts of "
        "its policy allows the host; send the file itself"
    )
    refusal = BadRequest(message, param="messages")
    return ProviderFailure(
        Fault.REFUSED,
        message,
        status=refusal.status,
        body=msgspec.json.encode({"error": refusal.body()}),
        log_message="the deployment takes no files by URL",
    )
