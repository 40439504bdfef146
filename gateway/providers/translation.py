"""Base of providers that translate chats to APIs which are not OpenAI's, and their answers back.

`TranslatingProvider` renders a call by the fields of its chat, and rejects a field that the API cannot express with an
error that names it. `FieldTable` lists the fields that an API has words for. `TranslatedResponse` and
`TranslatedStream` pass complete answers and streams through a translator of the API.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Protocol, TypeVar

import msgspec

from gateway.providers.base import Fault, ProviderFailure, UpstreamResponse
from gateway.providers.openai import OpenAI
from gateway.providers.redaction import Redactor
from gateway.providers.responses import EventStreamResponse, JSONResponse, Splitter
from gateway.providers.sse import FrameSplitter
from gateway.providers.transport import HTTPResponse
from gateway.providers.upstream_errors import failure_in_body
from gateway.types import Call, Operation

Fields = Mapping[str, msgspec.Raw]
Value = TypeVar("Value")

INVALID_REQUEST = "invalid_request_error"
NOTHING = msgspec.Raw()  # a missing field
NEUTRAL_BYTES_MAX = 100  # of a value without effect, in any form of its JSON; longer values are not parsed
OTHER = object()  # a value that differs from all others


class UnsupportedField(Exception):
    """The call has a field or value that cannot be translated. `param` is its path, for example `tools[0].type`."""

    def __init__(self, message: str, param: str) -> None:
        super().__init__(f"{param}: {message}")
        self.param = param


class MalformedAnswer(ValueError):
    """A body or an event does not have the API's format."""


def field_decoder(kind: type[Value] | Any) -> Callable[[msgspec.Raw], Any]:
    """Return a decoder for a field whose value is of this type or null."""
    return msgspec.json.Decoder(kind | None).decode


def read_field(fields: Fields, name: str, decode: Callable[[msgspec.Raw], Any]) -> Any:
    """Return a field's value, or None if it is missing. Raises `UnsupportedField` if the value has the wrong type."""
    if name not in fields:
        return None
    try:
        return decode(fields[name])
    except msgspec.ValidationError as problem:
        message, _, path = str(problem).partition(" - at `$")
        raise UnsupportedField(message, f"{name}{path.rstrip('`')}") from None


def is_given(value: msgspec.Raw) -> bool:
    """Whether a field is present and not null."""
    return bytes(value) not in (b"", b"null")


def one_of(known: Mapping[str, str], value: str, param: str) -> str:
    """Return the API's word for a value. Raises `UnsupportedField` if it has none."""
    try:
        return known[value]
    except KeyError:
        raise UnsupportedField(f"{value!r} is not one of {', '.join(known)}", param) from None


@dataclass(frozen=True)
class FieldTable:
    """The top-level fields of a chat that an API can express.

    `ignored` fields are dropped, because no answer depends on them. `neutral` fields have no effect with the listed
    values, and request what the API lacks with others. All other fields are rejected.
    """

    api: str  # in errors, as in "Anthropic's Messages API"
    translated: frozenset[str]
    ignored: frozenset[str]
    neutral: Mapping[str, tuple[Any, ...]]

    def check(self, fields: Fields) -> None:
        """Raise `UnsupportedField` for a field that cannot be translated."""
        for name in fields.keys() - self.translated - self.ignored:
            is_short = memoryview(fields[name]).nbytes <= NEUTRAL_BYTES_MAX
            value = msgspec.json.decode(fields[name]) if is_short else OTHER
            if value is not None and value not in self.neutral.get(name, ()):
                what = "this value is not supported" if name in self.neutral else "this field is not supported"
                raise UnsupportedField(f"{what} by this model's server, which speaks {self.api}", name)


class TranslatingProvider(OpenAI):
    """Base of the providers of other APIs."""

    api: ClassVar[str]  # in errors
    operations: ClassVar[Mapping[Operation, str]] = {Operation.CHAT: "chats"}  # with their names in errors
    splitter: ClassVar[type[Splitter]] = FrameSplitter  # of streams into frames

    def check_fields(self, fields: Fields) -> None:
        """Raise `UnsupportedField` for the first top-level field that cannot be translated."""
        raise NotImplementedError

    def request_of(self, call: Call) -> dict[str, Any]:
        """Return the body of the upstream request. Raises `UnsupportedField`."""
        raise NotImplementedError

    def translate_answer(self, call: Call, body: bytes) -> bytes:
        """Return a complete answer in OpenAI's format. Raises `MalformedAnswer`."""
        raise NotImplementedError

    def stream_translator(self, call: Call) -> StreamTranslator:
        """Return the translator of one stream."""
        raise NotImplementedError

    def unsupported_error(self, call: Call) -> ProviderFailure | None:
        """Return an error if the API lacks the operation, or has no words for a top-level field."""
        if call.native is not None and (self.passes(call) or call.native.refusal is not None):
            return super().unsupported_error(call)
        if call.operation not in self.operations:
            known = " and ".join(self.operations.values())
            message = f"this model's server speaks {self.api}, which supports only {known}: "
            return self._rejected(f"{message}it has no {call.operation.value}", None)
        try:
            self.check_fields(self.fields_of(call))
        except UnsupportedField as problem:
            return self._rejected(str(problem), problem.param)
        return None

    def render(self, call: Call) -> bytes:
        """Return the body of the request. Raises `ProviderFailure` if the call cannot be translated."""
        if self.passes(call):
            return super().render(call)
        if call.operation not in self.operations and (refusal := self.unsupported_error(call)) is not None:
            raise refusal
        try:
            return msgspec.json.encode(self.request_of(call))
        except UnsupportedField as problem:
            raise self._rejected(str(problem), problem.param) from None

    def fields_of(self, call: Call) -> Fields:
        """Return the call's fields, without those that the policy omits for this deployment, and without advice.

        No other API has a verbosity, so one that is only a hint is omitted.
        """
        omitted = {*self._omitted_fields, "verbosity"} if "verbosity" in call.hints else self._omitted_fields
        if omitted:
            return {name: value for name, value in call.fields.items() if name not in omitted}
        return call.fields

    def response_of(self, call: Call, response: HTTPResponse) -> UpstreamResponse:
        """Wrap a response, so that its chunks have OpenAI's format, or the client's if it is the deployment's."""
        if self.passes(call):
            return super().response_of(call, response)
        if call.stream:
            return TranslatedStream(response, self._redactor, self.stream_translator(call), self.splitter)
        return TranslatedResponse(response, self._redactor, partial(self.translate_answer, call))

    def _rejected(self, message: str, param: str | None) -> ProviderFailure:
        """Return the failure for a call that cannot be translated. Its log message has no value of the call."""
        body = error_body(message, param=param, code="unsupported_parameter" if param else "unsupported_operation")
        log_message = f"{self.api} does not support {param or 'this operation'}"
        return ProviderFailure(Fault.UNSUPPORTED, message, status=400, body=body, log_message=log_message)


class StreamTranslator(Protocol):
    """Translates the events of one stream to chunks of a chat completion."""

    end_marker: str  # of the stream, in error messages
    ended: bool  # the end marker has been translated
    failure: Any  # the error that an event reported, or None

    def feed(self, frames: bytes) -> bytes:
        """Translate complete frames to chunks. Drops events after an end or a failure. Raises `MalformedAnswer`."""

    def finish(self) -> bytes:
        """Return what follows the last event at a clean end of the body: nothing, or an end if the answer has one.

        Called only if the end has not been translated. Sets `ended` if the answer is complete.
        """


class TranslatedResponse(JSONResponse):
    """A complete answer, translated to OpenAI's format."""

    def __init__(self, response: HTTPResponse, redactor: Redactor, translate: Callable[[bytes], bytes]) -> None:
        super().__init__(response, redactor)
        self._translate = translate

    async def __anext__(self) -> bytes:
        body = await super().__anext__()
        try:
            return self._translate(body)
        except MalformedAnswer as problem:
            raise ProviderFailure(Fault.MALFORMED, str(problem)) from None


class TranslatedStream(EventStreamResponse):
    """A stream, whose events are translated to chunks of a chat completion."""

    def __init__(
        self,
        response: HTTPResponse,
        redactor: Redactor,
        translator: StreamTranslator,
        splitter: Callable[[int], Splitter],
    ) -> None:
        super().__init__(response, redactor, splitter=splitter)
        self._translator = translator

    def last_chunk(self, frames: bytes) -> bytes:
        """Return the last chunk of a body that ended cleanly. `frames` is a last frame that lacks its line end."""
        chunk = b""
        if frames.strip():
            try:
                chunk = self.chunk_of(frames)
            except ProviderFailure as failure:
                if failure.fault is not Fault.MALFORMED:
                    raise
                raise ProviderFailure(Fault.CUT, f"the stream ended without {self._translator.end_marker}") from None
        if not self._ended and self._failure is None:
            chunk += self._translator.finish()
            self._ended = self._translator.ended
        if not self._ended and self._failure is None:
            raise ProviderFailure(Fault.CUT, f"the stream ended without {self._translator.end_marker}")
        return chunk

    def chunk_of(self, frames: bytes) -> bytes:
        """Translate events to chat chunks. Raises `ProviderFailure` for events that do not have the API's format."""
        try:
            chunks = self._translator.feed(frames)
        except MalformedAnswer as problem:
            raise ProviderFailure(Fault.MALFORMED, str(problem)) from None
        self._ended = self._translator.ended
        if self._translator.failure is not None:
            started = self._started or bool(chunks)
            self._failure = failure_in_body(self._translator.failure, started=started, redactor=self._redactor)
            if not chunks:
                raise self._failure
        self._started = self._started or bool(chunks)
        return chunks


def error_body(message: str, *, code: str | None, kind: str = INVALID_REQUEST, param: str | None = None) -> bytes:
    """Return the body of an error response in OpenAI's format."""
    return msgspec.json.encode({"error": {"message": message, "type": kind, "param": param, "code": code}})
