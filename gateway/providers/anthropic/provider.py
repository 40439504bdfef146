"""Servers that speak Anthropic's Messages: a call goes out in their words, and its answer comes back as a chat's."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import msgspec

from gateway.policy import Deployment, EnvSecret
from gateway.providers.anthropic.fields import Fields, Unsaid, check
from gateway.providers.anthropic.reply import ChatStream, Unreadable, chat_error, ends_stream, error_body, whole_chat
from gateway.providers.anthropic.request import message_request
from gateway.providers.base import Fault, ProviderFailure, Reply
from gateway.providers.openai import EventStreamReply, JSONReply, OpenAI
from gateway.providers.refusals import MAX_ERROR_BYTES, failure_told
from gateway.providers.transport import Answer, HTTPTransport
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

    def refusal_of(self, call: Call) -> ProviderFailure | None:
        if call.operation is not Operation.CHAT:
            return _refused(_NOT_A_CHAT.format(call.operation.value), None)
        try:
            check(self._said(call))
        except Unsaid as problem:
            return _refused(str(problem), problem.param)
        return None

    def render(self, call: Call) -> bytes:
        if call.operation is not Operation.CHAT:
            raise _refused(_NOT_A_CHAT.format(call.operation.value), None)
        try:
            request = message_request(self._said(call), self._served, self._default_max_tokens)
        except Unsaid as problem:
            raise _refused(str(problem), problem.param) from None
        if call.stream:
            request["stream"] = True
        return msgspec.json.encode(request)

    def _said(self, call: Call) -> Fields:
        if self._left_out:
            return {name: value for name, value in call.fields.items() if name not in self._left_out}
        return call.fields

    def reply(self, call: Call, answer: Answer) -> Reply:
        return MessageStreamReply(answer) if call.stream else MessageReply(answer)

    def in_our_words(self, failure: ProviderFailure) -> ProviderFailure:
        if failure.status == OVERLOADED_STATUS:
            failure.status = 503
        failure.body = chat_error(failure.body)
        return failure

    async def prompt_tokens_of(self, call: Call) -> int | None:
        try:
            request = message_request(self._said(call), self._served, self._default_max_tokens)
        except Unsaid:
            return None
        body = msgspec.json.encode({name: request[name] for name in _COUNTED if name in request})
        told = await self._post(self._base_path + b"/messages/count_tokens", body, MAX_ERROR_BYTES)
        try:
            return None if told is None else _counted(told).input_tokens
        except msgspec.MsgspecError:
            return None


class MessageReply(JSONReply):
    async def __anext__(self) -> bytes:
        body = await super().__anext__()
        try:
            return whole_chat(body)
        except Unreadable as problem:
            raise ProviderFailure(Fault.MALFORMED, str(problem)) from None


class MessageStreamReply(EventStreamReply):
    end = "message_stop"

    def __init__(self, answer: Answer) -> None:
        super().__init__(answer)
        self._chat = ChatStream()

    def ends_with(self, frames: bytes) -> bool:
        return ends_stream(frames)

    def checked(self, frames: bytes) -> bytes:
        try:
            chunks = self._chat.feed(frames)
        except Unreadable as problem:
            raise ProviderFailure(Fault.MALFORMED, str(problem)) from None
        self._ended = self._chat.ended
        if self._chat.failure is not None:
            self._failure = failure_told(self._chat.failure, begun=True)
            if not chunks:
                raise self._failure
        return chunks


def _refused(message: str, param: str | None) -> ProviderFailure:
    body = error_body(message, param=param, code="unsupported_parameter" if param else "unsupported_operation")
    for_log = f"Messages have no words for {param or 'what is asked for'}"
    return ProviderFailure(Fault.REFUSED, message, status=400, body=body, for_log=for_log)
