"""POST /v1/responses, and /v1/responses/input_tokens: OpenAI's Responses API, without anything that would have to be
kept.

A request becomes one of a chat (`body.py`, `items.py`, `tools.py`), and a chat's answer a response (`output.py`,
`response.py`), or the events of one (`events.py`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, ClassVar

import msgspec

from gateway.doors import base
from gateway.doors.base import Fields, read_fields
from gateway.doors.chat import read_chat
from gateway.doors.responses.body import chat_fields, own_name, read_body
from gateway.doors.responses.events import EventStream
from gateway.doors.responses.response import Response, whole
from gateway.errors import GatewayError, UpstreamRefused
from gateway.types import Operation

__all__ = ["InputTokensDoor", "ResponsesDoor"]


class ResponsesDoor:
    path: ClassVar[str] = "responses"
    operation: ClassVar[Operation] = Operation.CHAT

    def translator(self, call_id: str) -> ResponsesTranslator:
        return ResponsesTranslator(call_id)

    def read(self, fields: Fields, body: bytes) -> base.Asked:
        return self.translator("").read(fields, body)


class ResponsesTranslator:
    operation: ClassVar[Operation] = Operation.CHAT

    def __init__(self, call_id: str) -> None:
        self._key = call_id.removeprefix("req_")
        self._response: Response | None = None
        self._events: EventStream | None = None

    def read(self, fields: Fields, body: bytes) -> base.Asked:
        asked = read_body(fields, body)
        chat = msgspec.json.encode(chat_fields(asked))
        self._response = Response(self._key, asked)
        self._events = EventStream(self._response, obfuscates=asked.obfuscates)
        return read_chat(read_fields(chat), chat)

    def headers(self, named: Mapping[str, str]) -> Mapping[str, str]:
        return {}

    def answer(self, body: bytes) -> bytes:
        assert self._response is not None
        return whole(self._response, body)

    def frames(self, chunk: bytes, *, last: bool) -> bytes:
        assert self._events is not None
        return self._events.frames(chunk, last=last)

    def refusal(self, error: GatewayError) -> tuple[int, bytes] | None:
        """A server's refusal names the fields of a chat, which this client has not sent."""
        if not isinstance(error, UpstreamRefused):
            return None
        try:
            told: Any = msgspec.json.decode(error.content)
            theirs = told["error"]["param"]
            own = own_name(theirs)
            told["error"]["param"] = own
            told["error"]["message"] = re.sub(rf"(?<!\w){re.escape(theirs)}(?!\w)", own, told["error"]["message"])
        except (msgspec.MsgspecError, LookupError, TypeError, AttributeError):
            return None
        return error.upstream_status, msgspec.json.encode(told)

    def failure(self, error: GatewayError) -> bytes:
        assert self._events is not None
        return self._events.failure(error)


class InputTokensDoor:
    """How many tokens the prompt of a response has. Nothing is generated."""

    path: ClassVar[str] = "responses/input_tokens"
    operation: ClassVar[Operation] = Operation.CHAT

    def translator(self, call_id: str) -> InputTokensTranslator:
        return InputTokensTranslator(call_id)

    def read(self, fields: Fields, body: bytes) -> base.Asked:
        return self.translator("").read(fields, body)


class InputTokensTranslator(ResponsesTranslator):
    def answer(self, body: bytes) -> bytes:
        tokens = msgspec.json.decode(body)["prompt_tokens"]
        return msgspec.json.encode({"object": "response.input_tokens", "input_tokens": tokens})
