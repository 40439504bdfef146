"""POST /v1/responses, and /v1/responses/input_tokens: OpenAI's Responses API.

A request becomes one of a chat (`body.py`, `items.py`, `tools.py`), and a chat's answer a response (`output.py`,
`response.py`), or the events of one (`events.py`). Where the policy says so, it is kept (`kept.py`), and a later
request goes on from it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, ClassVar

import msgspec

from gateway.core.errors import GatewayError, UpstreamRefused
from gateway.endpoints.chat import read_chat
from gateway.endpoints.responses.body import ResponsesRequest, chat_fields, input_items, own_name, read_body
from gateway.endpoints.responses.events import EventStream
from gateway.endpoints.responses.reading import ABSENT
from gateway.endpoints.responses.references import MARK, with_items
from gateway.endpoints.responses.response import Response
from gateway.endpoints.responses.stored import NO_HISTORY, History, Turn, document_of, read_history, with_ids
from gateway.prompts import reader
from gateway.prompts.reader import Fields, decode, read_fields
from gateway.response_store import StoringTranslator, TenantResponses
from gateway.types import Operation

__all__ = ["InputTokensEndpoint", "ResponsesEndpoint"]


class ResponsesEndpoint:
    path: ClassVar[str] = "responses"
    operation: ClassVar[Operation] = Operation.CHAT

    def translator(self, call_id: str) -> ResponsesTranslator:
        return ResponsesTranslator(call_id)

    def read(self, fields: Fields, body: bytes) -> reader.ParsedBody:
        return self.translator("").read(fields, body)


class _GoesOn(msgspec.Struct):
    """What of a body may refer to something that is kept."""

    previous_response_id: str | None = None
    input: msgspec.Raw = ABSENT


_goes_on = msgspec.json.Decoder(_GoesOn)


class ResponsesTranslator(StoringTranslator):
    operation: ClassVar[Operation] = Operation.CHAT

    def __init__(self, call_id: str) -> None:
        self._call_id = call_id
        self._tenant_responses: TenantResponses | None = None
        self._history: History | None = None  # None where nothing is kept
        self._input: list[msgspec.Raw] | None = None  # where it refers to items, with these in their places
        self._asked: ResponsesRequest | None = None
        self._response: Response | None = None
        self._events: EventStream | None = None

    @property
    def _key(self) -> str:
        return self._call_id.removeprefix("req_")

    async def recall(self, body: bytes, tenant_responses: TenantResponses) -> None:
        self._tenant_responses = tenant_responses
        asked = decode(_goes_on, body)
        previous = asked.previous_response_id
        self._history = NO_HISTORY if previous is None else await read_history(previous, tenant_responses)
        if MARK in (said := bytes(asked.input)) and said.startswith(b"["):
            self._input = await with_items(msgspec.json.decode(said, type=list[msgspec.Raw]), tenant_responses)

    def read(self, fields: Fields, body: bytes) -> reader.ParsedBody:
        asked = self._asked = read_body(fields, body, self._history)
        if self._input is not None:
            asked.body.input = self._input
        chat = msgspec.json.encode(chat_fields(asked))
        stored = self._history is not None and asked.body.store is not False
        self._response = Response(self._key, asked, stored=stored)
        self._events = EventStream(self._response, obfuscates=asked.obfuscates)
        return msgspec.structs.replace(read_chat(read_fields(chat), chat), hints=reader.ADVICE)

    def headers(self, named: Mapping[str, str]) -> Mapping[str, str]:
        return {}

    def answer(self, body: bytes) -> bytes:
        assert self._response is not None
        self._response.read_whole(body)
        self.waits = self._response.stored
        return b"" if self.waits else self._whole()

    def _whole(self) -> bytes:
        assert self._response is not None
        return msgspec.json.encode(self._response.json(self._response.status))

    def frames(self, chunk: bytes, *, last: bool) -> bytes:
        assert self._events is not None and self._response is not None
        told = self._events.frames(chunk, last=last)
        if not last:
            return told
        self.waits = self._response.stored
        return told if self.waits else told + self._events.end()

    async def rest(self) -> bytes:
        assert self._asked is not None and self._response is not None and self._events is not None
        self.waits = False
        response = self._response
        self._response.stored = await self._keep(self._asked, response)
        return self._events.end() if self._asked.body.stream else self._whole()

    async def _keep(self, asked: ResponsesRequest, response: Response) -> bool:
        """Whether it is kept."""
        assert self._tenant_responses is not None
        told = response.json(response.status)
        output = [msgspec.json.encode(item) for item in told["output"]]
        turn = Turn(with_ids(input_items(asked.body), self._key), output, response.output.signed())
        document = document_of(told, turn, asked.history)
        return await self._tenant_responses.put(response.id, document, call_id=self._call_id)

    def let_go(self) -> None:
        if self._tenant_responses is not None:
            self._tenant_responses.let_go()

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
        except (msgspec.MsgspecError, RecursionError, LookupError, TypeError, AttributeError):
            return None
        return error.upstream_status, msgspec.json.encode(told)

    def failure(self, error: GatewayError) -> bytes:
        assert self._events is not None
        return self._events.failure(error)


class InputTokensEndpoint:
    """How many tokens the prompt of a response has. Nothing is generated."""

    path: ClassVar[str] = "responses/input_tokens"
    operation: ClassVar[Operation] = Operation.CHAT

    def translator(self, call_id: str) -> InputTokensTranslator:
        return InputTokensTranslator(call_id)

    def read(self, fields: Fields, body: bytes) -> reader.ParsedBody:
        return self.translator("").read(fields, body)


class InputTokensTranslator(ResponsesTranslator):
    """It keeps nothing: what it is asked for is no response."""

    def answer(self, body: bytes) -> bytes:
        tokens = msgspec.json.decode(body)["prompt_tokens"]
        return msgspec.json.encode({"object": "response.input_tokens", "input_tokens": tokens})
