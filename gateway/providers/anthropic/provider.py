"""The provider for Anthropic's Messages API: sends a chat call as a message request, and returns a chat completion.

`Anthropic` builds the request body with `request` and sends it like the OpenAI provider. `MessageResponse` translates a
complete answer with `response`, and `MessageStreamResponse` translates the events of a stream.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import msgspec

from gateway.policy import Deployment, Secret
from gateway.providers.anthropic.fields import Fields, UnsupportedField, check_fields
from gateway.providers.anthropic.request import message_request
from gateway.providers.anthropic.response import (
    MalformedMessage,
    MessageStreamTranslator,
    chat_completion,
    ends_stream,
    error_body,
    openai_error,
)
from gateway.providers.base import Fault, ProviderFailure, UpstreamResponse
from gateway.providers.openai import OpenAI
from gateway.providers.redaction import Redactor
from gateway.providers.responses import EventStreamResponse, JSONResponse
from gateway.providers.sse import UNREADABLE
from gateway.providers.transport import HTTPResponse, HTTPTransport
from gateway.providers.upstream_errors import MAX_ERROR_BYTES, failure_in_body
from gateway.providers.usage.base import TokenCount
from gateway.types import Call, Operation

VERSION = b"2026-10-21"
OVERLOADED_STATUS = 529  # Anthropic's status for overload; elsewhere the status is 503
_COUNTED_FIELDS = ("model", "messages", "system", "tools", "tool_choice", "thinking", "output_config", "cache_control")
_NOT_A_CHAT = "this model's server speaks Anthropic's Messages API, which supports only chats: it has no {}"


class _CountedPrompt(msgspec.Struct):
    input_tokens: TokenCount


_token_count = msgspec.json.Decoder(_CountedPrompt).decode


class Anthropic(OpenAI):
    """Provider for one deployment of Anthropic's API, or of a server with a compatible Messages API."""

    extra_headers: ClassVar[tuple[tuple[bytes, bytes], ...]] = ((b"anthropic-version", VERSION),)

    def __init__(
        self, deployment: Deployment, transport: HTTPTransport, resolve_secret: Callable[[Secret], str]
    ) -> None:
        super().__init__(deployment, transport, resolve_secret)
        self._default_max_tokens = deployment.default_max_tokens

    def path_of(self, operation: Operation) -> bytes:
        """Return the path of the Messages API, which has only one."""
        return b"messages"

    def unsupported_error(self, call: Call) -> ProviderFailure | None:
        """Return an error if the call is not a chat or has a top-level field that cannot be translated."""
        if call.operation is not Operation.CHAT:
            return _rejected(_NOT_A_CHAT.format(call.operation.value), None)
        try:
            check_fields(self._fields_of(call))
        except UnsupportedField as problem:
            return _rejected(str(problem), problem.param)
        return None

    def render(self, call: Call) -> bytes:
        """Return the chat as the body of a Messages request. Raises `ProviderFailure` if it cannot be translated."""
        if call.operation is not Operation.CHAT:
            raise _rejected(_NOT_A_CHAT.format(call.operation.value), None)
        try:
            request = message_request(self._fields_of(call), self.model_of(call), self._default_max_tokens)
        except UnsupportedField as problem:
            raise _rejected(str(problem), problem.param) from None
        if call.stream:
            request["stream"] = True
        return msgspec.json.encode(request)

    def _fields_of(self, call: Call) -> Fields:
        """Return the call's fields, without the fields that the policy omits for this deployment."""
        if self._omitted_fields:
            return {name: value for name, value in call.fields.items() if name not in self._omitted_fields}
        return call.fields

    def response_of(self, call: Call, response: HTTPResponse) -> UpstreamResponse:
        kind = MessageStreamResponse if call.stream else MessageResponse
        return kind(response, self._redactor)

    def translate_error(self, failure: ProviderFailure) -> ProviderFailure:
        """Return the failure with its body in OpenAI's format, and with status 503 instead of Anthropic's 529."""
        if failure.status == OVERLOADED_STATUS:
            failure.status = 503
        failure.body = openai_error(failure.body)
        return failure

    async def count_prompt_tokens(self, call: Call) -> int | None:
        """Request the count from /messages/count_tokens. See `Provider.count_prompt_tokens`."""
        try:
            request = message_request(self._fields_of(call), self.model_of(call), self._default_max_tokens)
        except UnsupportedField:
            return None
        body = msgspec.json.encode({name: request[name] for name in _COUNTED_FIELDS if name in request})
        response = await self._post(self._base_path + b"/messages/count_tokens", body, MAX_ERROR_BYTES)
        try:
            return None if response is None else _token_count(response).input_tokens
        except UNREADABLE:
            return None


class MessageResponse(JSONResponse):
    """A complete message, translated to a chat completion."""

    async def __anext__(self) -> bytes:
        body = await super().__anext__()
        try:
            return chat_completion(body)
        except MalformedMessage as problem:
            raise ProviderFailure(Fault.MALFORMED, str(problem)) from None


class MessageStreamResponse(EventStreamResponse):
    """A streamed message, whose events are translated to chunks of a chat completion."""

    end_marker = "message_stop"

    def __init__(self, response: HTTPResponse, redactor: Redactor) -> None:
        super().__init__(response, redactor)
        self._translator = MessageStreamTranslator()

    def is_last(self, frames: bytes) -> bool:
        """Whether one of the events in `frames` is `message_stop`."""
        return ends_stream(frames)

    def chunk_of(self, frames: bytes) -> bytes:
        """Translate events to chat chunks. Raises `ProviderFailure` for events that are not Anthropic's."""
        try:
            chunks = self._translator.feed(frames)
        except MalformedMessage as problem:
            raise ProviderFailure(Fault.MALFORMED, str(problem)) from None
        self._ended = self._translator.ended
        if self._translator.failure is not None:
            started = self._started or bool(chunks)
            self._failure = failure_in_body(self._translator.failure, started=started, redactor=self._redactor)
            if not chunks:
                raise self._failure
        self._started = self._started or bool(chunks)
        return chunks


def _rejected(message: str, param: str | None) -> ProviderFailure:
    """Return the failure for a call that cannot be translated. Its log message names the field but not the value."""
    body = error_body(message, param=param, code="unsupported_parameter" if param else "unsupported_operation")
    log_message = f"Anthropic's Messages API does not support {param or 'this operation'}"
    return ProviderFailure(Fault.REFUSED, message, status=400, body=body, log_message=log_message)
