"""Anthropic's wire: POST /v1/messages, POST /v1/messages/count_tokens, and its words for models and errors."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from functools import partial
from typing import ClassVar

import msgspec

from gateway.core import cache_breakpoints as breakpoints
from gateway.core.errors import GatewayError
from gateway.endpoints.chat import read_chat
from gateway.endpoints.messages.catalogue import asked_for_in
from gateway.endpoints.messages.catalogue import entry as model
from gateway.endpoints.messages.catalogue import listing as models
from gateway.endpoints.messages.errors import failure, refusal
from gateway.endpoints.messages.headers import headers_of
from gateway.endpoints.messages.reply import Events, Wording, message_of
from gateway.endpoints.messages.request import MessagesBody, PromptBody, chat_fields, prompt_fields, shows_thinking
from gateway.prompts.reader import ADVICE, Fields, ParsedBody, decode
from gateway.types import Operation

_messages = msgspec.json.Decoder(MessagesBody)
_prompt = msgspec.json.Decoder(PromptBody)
_encode = msgspec.json.encode
MARKED = ADVICE | {breakpoints.FIELD}


class _Translator(ABC):
    """What an exchange at either path has: headers, and errors."""

    operation = Operation.CHAT

    def __init__(self, call_id: str) -> None:
        self._request_id = call_id

    def read(self, fields: Fields, body: bytes) -> ParsedBody:
        asked = self._read(fields, body)
        if body.find(breakpoints.FIELD_JSON) < 0:
            return asked
        return msgspec.structs.replace(asked, with_breakpoints=partial(self._read, fields, body, with_breakpoints=True))

    def _read(self, fields: Fields, body: bytes, *, with_breakpoints: bool = False) -> ParsedBody:
        chat = self.chat_fields(fields, body, with_breakpoints=with_breakpoints)
        hints = MARKED if with_breakpoints else ADVICE
        return msgspec.structs.replace(read_chat(chat, _encode(chat)), hints=hints)

    @abstractmethod
    def chat_fields(self, fields: Fields, body: bytes, *, with_breakpoints: bool) -> Fields:
        """Raises `BadRequest`."""

    def headers(self, named: Mapping[str, str]) -> Mapping[str, str]:
        return headers_of(named, self._request_id, time.time())

    def refusal(self, error: GatewayError) -> tuple[int, bytes]:
        return refusal(error, self._request_id)

    def failure(self, error: GatewayError) -> bytes:
        return failure(error, self._request_id)


class MessagesTranslator(_Translator):
    def __init__(self, call_id: str) -> None:
        super().__init__(call_id)
        self._wording = Wording(f"msg_{call_id.removeprefix('req_')}")
        self._events: Events | None = None

    def chat_fields(self, fields: Fields, body: bytes, *, with_breakpoints: bool) -> Fields:
        asked = decode(_messages, body)
        self._wording = msgspec.structs.replace(self._wording, shows_thinking=shows_thinking(asked.thinking))
        return chat_fields(asked, fields, with_breakpoints=with_breakpoints)

    def answer(self, body: bytes) -> bytes:
        return message_of(body, self._wording)

    def frames(self, chunk: bytes, *, last: bool) -> bytes:
        if self._events is None:
            self._events = Events(self._wording)
        return self._events.frames(chunk, last=last)

    def failure(self, error: GatewayError) -> bytes:
        untold = self._events.untold if self._events is not None else []
        return b"".join([*untold, super().failure(error)])


class CountTranslator(_Translator):
    def chat_fields(self, fields: Fields, body: bytes, *, with_breakpoints: bool) -> Fields:
        return prompt_fields(decode(_prompt, body), with_breakpoints=with_breakpoints)

    def answer(self, body: bytes) -> bytes:
        return _encode({"input_tokens": msgspec.json.decode(body)["prompt_tokens"]})

    def frames(self, chunk: bytes, *, last: bool) -> bytes:
        raise AssertionError("a count is no stream")


class MessagesEndpoint:
    path: ClassVar[str] = "messages"
    operation: ClassVar[Operation] = Operation.CHAT

    def translator(self, call_id: str) -> MessagesTranslator:
        return MessagesTranslator(call_id)

    def read(self, fields: Fields, body: bytes) -> ParsedBody:
        return MessagesTranslator("").read(fields, body)


class CountTokensEndpoint:
    """How many tokens a prompt has. Nothing is generated."""

    path: ClassVar[str] = "messages/count_tokens"
    operation: ClassVar[Operation] = Operation.CHAT

    def translator(self, call_id: str) -> CountTranslator:
        return CountTranslator(call_id)

    def read(self, fields: Fields, body: bytes) -> ParsedBody:
        return CountTranslator("").read(fields, body)


__all__ = [
    "CountTokensEndpoint",
    "MessagesEndpoint",
    "MessagesTranslator",
    "asked_for_in",
    "model",
    "models",
    "refusal",
]
