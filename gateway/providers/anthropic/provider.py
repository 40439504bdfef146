"""Servers that speak Anthropic's Messages: a call goes out in their words, and its answer comes back as a chat's."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import msgspec

from gateway.policy import Deployment, EnvSecret
from gateway.providers.anthropic.fields import Fields, UnsupportedField, check
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
from gateway.providers.openai import EventStreamResponse, JSONResponse, OpenAI
from gateway.providers.transport import HTTPResponse, HTTPTransport
from gateway.providers.upstream_errors import MAX_ERROR_BYTES, failure_in_body
from gateway.types import Call, Operation

VERSION = b"2026-10-21"
OVERLOADED_STATUS = 529  # Anthropic's own, for what is a 503 elsewhere
_COUNTED = ("model", "messages", "system", "tools", "tool_choice", "thinking", "output_config", "cache_control")
_NOT_A_CHAT = "the server of this model speaks Anthropic's Messages, which are chats: it has no {}"


class _Counted(msgspec.Struct):
    input_tokens: int


_counted = msgspec.json.Decoder(_Counted).decode


class Anthropic(OpenAI):
    """One deployment of Anthropic's API, or of a server that has its Messages."""

    own_headers: ClassVar[tuple[tuple[bytes, bytes], ...]] = ((b"anthropic-version", VERSION),)

    def __init__(
        self, deployment: Deployment, transport: HTTPTransport, resolve_secret: Callable[[EnvSecret], str]
    ) -> None:
        super().__init__(deployment, transport, resolve_secret)
        self._default_max_tokens = deployment.default_max_tokens

    def path_of(self, operation: Operation) -> bytes:
        return b"messages"

    def unsupported_error(self, call: Call) -> ProviderFailure | None:
        if call.operation is not Operation.CHAT:
            return _refused(_NOT_A_CHAT.format(call.operation.value), None)
        try:
            check(self._said(call))
        except UnsupportedField as problem:
            return _refused(str(problem), problem.param)
        return None

    def render(self, call: Call) -> bytes:
        if call.operation is not Operation.CHAT:
            raise _refused(_NOT_A_CHAT.format(call.operation.value), None)
        try:
            request = message_request(self._said(call), self._served, self._default_max_tokens)
        except UnsupportedField as problem:
            raise _refused(str(problem), problem.param) from None
        if call.stream:
            request["stream"] = True
        return msgspec.json.encode(request)

    def _said(self, call: Call) -> Fields:
        if self._left_out:
            return {name: value for name, value in call.fields.items() if name not in self._left_out}
        return call.fields

    def reply(self, call: Call, answer: HTTPResponse) -> UpstreamResponse:
        return MessageStreamResponse(answer) if call.stream else MessageResponse(answer)

    def in_our_words(self, failure: ProviderFailure) -> ProviderFailure:
        if failure.status == OVERLOADED_STATUS:
            failure.status = 503
        failure.body = openai_error(failure.body)
        return failure

    async def count_prompt_tokens(self, call: Call) -> int | None:
        try:
            request = message_request(self._said(call), self._served, self._default_max_tokens)
        except UnsupportedField:
            return None
        body = msgspec.json.encode({name: request[name] for name in _COUNTED if name in request})
        told = await self._post(self._base_path + b"/messages/count_tokens", body, MAX_ERROR_BYTES)
        try:
            return None if told is None else _counted(told).input_tokens
        except msgspec.MsgspecError:
            return None


class MessageResponse(JSONResponse):
    async def __anext__(self) -> bytes:
        body = await super().__anext__()
        try:
            return chat_completion(body)
        except MalformedMessage as problem:
            raise ProviderFailure(Fault.MALFORMED, str(problem)) from None


class MessageStreamResponse(EventStreamResponse):
    end = "message_stop"

    def __init__(self, answer: HTTPResponse) -> None:
        super().__init__(answer)
        self._chat = MessageStreamTranslator()

    def ends_with(self, frames: bytes) -> bool:
        return ends_stream(frames)

    def checked(self, frames: bytes) -> bytes:
        try:
            chunks = self._chat.feed(frames)
        except MalformedMessage as problem:
            raise ProviderFailure(Fault.MALFORMED, str(problem)) from None
        self._ended = self._chat.ended
        if self._chat.failure is not None:
            self._failure = failure_in_body(self._chat.failure, begun=True)
            if not chunks:
                raise self._failure
        return chunks


def _refused(message: str, param: str | None) -> ProviderFailure:
    body = error_body(message, param=param, code="unsupported_parameter" if param else "unsupported_operation")
    log_message = f"Messages have no words for {param or 'what is asked for'}"
    return ProviderFailure(Fault.REFUSED, message, status=400, body=body, log_message=log_message)
