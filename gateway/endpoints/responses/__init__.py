"""OpenAI's Responses API: POST /v1/responses and /v1/responses/input_tokens.

A request is translated to a chat request (`body.py`, `items.py`, `tools.py`). The chat answer is translated to a
response (`output.py`, `response.py`) or to a stream of events (`events.py`). If the policy enables it, the response is
stored (`stored.py`). A later request can then continue the response (`previous_response_id`) or refer to its items
(`references.py`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, ClassVar

import msgspec

from gateway.core.errors import BadRequest, GatewayError, UpstreamRefused
from gateway.core.native_requests import RESPONSES, NativeRequest
from gateway.core.worker_thread import LARGE_BYTES, in_thread
from gateway.endpoints.chat import read_chat
from gateway.endpoints.rendering import error_frame
from gateway.endpoints.responses.body import (
    NO_BACKGROUND_HERE,
    ConversationParam,
    ResponsesRequest,
    chat_fields,
    client_field,
    conversation_id,
    input_items,
    read_body,
)
from gateway.endpoints.responses.conversations import Conversation
from gateway.endpoints.responses.events import ResponseEvents
from gateway.endpoints.responses.passed import PassedResponse, input_of_fields
from gateway.endpoints.responses.references import REFERENCE_TYPE, resolve_references
from gateway.endpoints.responses.response import ResponseObject
from gateway.endpoints.responses.stored import (
    NO_HISTORY,
    ResponseHistory,
    StoredTurn,
    document_of,
    read_history,
    with_ids,
)
from gateway.endpoints.responses.strict_json import ABSENT
from gateway.endpoints.responses.tools import NO_HOSTED_TOOLS
from gateway.endpoints.untranslated import read_untranslated
from gateway.policy import Policy
from gateway.policy.hosted_tools import HostedToolAction
from gateway.prompts import reader
from gateway.prompts.reader import Fields, decode, read_fields
from gateway.response_store import StoringTranslator, TenantResponses
from gateway.storage.base import Document
from gateway.types import Operation

PREVIOUS = "previous_response_id"
# Fields that refer to objects at the vendor, which all tenants of the deployment's key would share.
STATE_FIELDS = frozenset({PREVIOUS, "conversation", "background"})
REPLACED = frozenset({PREVIOUS, "conversation"})  # fields of which the gateway's own storage has the objects
UNSET = (b"null", b"false")
DROPPED_CHARACTERS = 500  # of the header that names dropped tools

__all__ = ["InputTokensEndpoint", "ResponsesEndpoint"]


class ResponsesEndpoint:
    """POST /v1/responses."""

    path: ClassVar[str] = "responses"
    operation: ClassVar[Operation] = Operation.CHAT

    def translator(self, call_id: str) -> ResponsesTranslator:
        return ResponsesTranslator(call_id)

    def read(self, fields: Fields, body: bytes) -> reader.ParsedBody:
        return self.translator("").read(fields, body)


class _References(msgspec.Struct):
    """The fields of a body that may refer to stored responses, and the one that makes it run in the background."""

    background: bool | None = None
    previous_response_id: str | None = None
    conversation: str | ConversationParam | None = None
    input: msgspec.Raw = ABSENT


_references = msgspec.json.Decoder(_References)


class ResponsesTranslator(StoringTranslator):
    """Translates one exchange of POST /v1/responses, and stores its response.

    The last bytes of an answer are sent only after the response is stored, so a client can continue every response
    that it has received. `answer` and `frames` therefore keep the last bytes and set `must_store`. `store_and_finish`
    then stores the response and returns those bytes.
    """

    operation: ClassVar[Operation] = Operation.CHAT
    api: ClassVar[str] = RESPONSES
    in_background: ClassVar[bool] = False  # whether the response runs in the background
    may_run_in_background: ClassVar[bool] = True

    def __init__(self, call_id: str) -> None:
        self._call_id = call_id
        # Set if the request was refused because it is to run in the background. In a batch, for example, it cannot.
        self.background_body: bytes | None = None
        self._passed: PassedResponse | None = None  # set if the answer has this API's format already
        self._tenant_responses: TenantResponses | None = None
        self._history: ResponseHistory | None = None  # None if the policy stores no responses
        self._conversation: Conversation | None = None
        self._input: list[msgspec.Raw] | None = None  # the input with its item references resolved, if it has any
        self._fields: Fields = {}  # as the client sent them
        self._request: ResponsesRequest | None = None
        self._hosted_tools: Mapping[str, HostedToolAction] = NO_HOSTED_TOOLS
        self._response: ResponseObject | None = None
        self._events: ResponseEvents | None = None

    @property
    def _key(self) -> str:
        """Return the part that the ids of the response and its items have in common."""
        return self._call_id.removeprefix("req_")

    async def load_history(self, body: bytes, tenant_responses: TenantResponses) -> None:
        self._tenant_responses = tenant_responses
        references = await in_thread(decode, _references, body) if self.large else decode(_references, body)
        if references.background and self.may_run_in_background and not self.in_background:
            self.background_body = body
            raise BadRequest(f"background: {NO_BACKGROUND_HERE}", param="background")
        previous, conversation = references.previous_response_id, conversation_id(references.conversation)
        if conversation is not None:
            if previous is not None:
                raise BadRequest(
                    f"{PREVIOUS}: cannot be combined with `conversation`; omit one of them", param=PREVIOUS
                )
            self._conversation = Conversation(tenant_responses.conversations, conversation, param="conversation")
            self._history = await self._conversation.read_history(tenant_responses.hold)
        else:
            self._history = NO_HISTORY if previous is None else await read_history(previous, tenant_responses)
        self.large = self.large or self._history.bytes > LARGE_BYTES
        if REFERENCE_TYPE in (items := bytes(references.input)) and items.startswith(b"["):
            reader.check_utf8(items)
            self._input = await resolve_references(msgspec.json.decode(items, type=list[msgspec.Raw]), tenant_responses)

    def read(self, fields: Fields, body: bytes) -> reader.ParsedBody:
        self._fields = fields
        request = self._request = read_body(
            fields, body, self._history, self._hosted_tools, in_background=self.in_background
        )
        if self._input is not None:
            request.body.input = self._input
        chat = msgspec.json.encode(chat_fields(request))
        stored = self._history is not None and request.body.store is not False
        self._response = ResponseObject(self._key, request, stored=stored)
        self._events = ResponseEvents(self._response, wants_obfuscation=request.wants_obfuscation)
        # The events of a response in the background are the gateway's own, so it is always translated.
        native = None if self.in_background else NativeRequest(RESPONSES, self._native_fields(fields))
        return msgspec.structs.replace(read_chat(read_fields(chat), chat), hints=reader.ADVISORY_FIELDS, native=native)

    def _native_fields(self, fields: Fields) -> Fields:
        """Return the fields for a deployment that has this API: with the whole conversation instead of its id."""
        history = self._history or NO_HISTORY
        if self._input is None and not history.items and self._conversation is None:
            return fields
        items = input_of_fields(fields) if self._input is None else self._input
        joined = msgspec.Raw(msgspec.json.encode([*history.items, *items]))
        return {name: value for name, value in fields.items() if name not in REPLACED} | {"input": joined}

    def read_native(self, fields: Fields, body: bytes, refusal: BadRequest) -> reader.ParsedBody:
        """Read a body that passes only to deployments with this API. See `NativeReader`."""
        stateful = STATE_FIELDS if self._history is None else STATE_FIELDS - REPLACED
        if self.in_background or not stateful.isdisjoint(
            name for name, value in fields.items() if bytes(value) not in UNSET
        ):
            raise refusal
        self._request = None
        native = self._native_fields(fields)
        return read_untranslated(RESPONSES, native, msgspec.json.encode(native), refusal)

    def pass_answer(self) -> None:
        self._passed = PassedResponse()

    def use_policy(self, policy: Policy) -> None:
        self._hosted_tools = policy.hosted_tools

    def headers(self, named: Mapping[str, str]) -> Mapping[str, str]:
        dropped = () if self._request is None else self._request.tools.dropped
        return {"x-warmpath-dropped-tools": ",".join(dict.fromkeys(dropped))[:DROPPED_CHARACTERS]} if dropped else {}

    def answer(self, body: bytes) -> bytes:
        if self._passed is not None:
            return self._pass_on(self._passed, body, body, last=True)
        assert self._response is not None
        self._response.read_whole(body)
        self.must_store = self._response.stored or self._conversation is not None
        return b"" if self.must_store else self._whole()

    def _whole(self) -> bytes:
        assert self._response is not None
        return msgspec.json.encode(self._response.json(self._response.status))

    def _pass_on(self, passed: PassedResponse, chunk: bytes, response: bytes | None, *, last: bool) -> bytes:
        """Return bytes that pass unchanged. The last ones wait until the response is stored, if it is."""
        if response is not None:
            passed.set_response(response)
        if (
            last
            and self._history is not None
            and passed.is_storable
            and (bytes(self._fields.get("store", b"")) != b"false" or self._conversation is not None)
        ):
            self.must_store, passed.held = True, chunk
            return b""
        return chunk

    def frames(self, chunk: bytes, *, last: bool) -> bytes:
        if self._passed is not None:
            self._passed.read(chunk)
            return self._pass_on(self._passed, chunk, None, last=last)
        assert self._events is not None and self._response is not None
        events = self._events.frames(chunk, last=last)
        if not last:
            return events
        self.must_store = self._response.stored or self._conversation is not None
        return events if self.must_store else events + self._events.end()

    async def store_and_finish(self) -> bytes:
        if self._passed is not None:
            assert self._tenant_responses is not None
            self.must_store = False
            await self._passed.store(
                self._fields,
                self._input,
                self._history or NO_HISTORY,
                self._tenant_responses,
                self._call_id,
                self._conversation,
            )
            return self._passed.held
        assert self._request is not None and self._response is not None and self._events is not None
        self.must_store = False
        response = self._response
        if self._conversation is not None and not await self._append(self._request, response, self._conversation):
            response.conversation = None
        if response.stored:
            response.stored = await self._store(self._request, response)
        return self._events.end() if self._request.body.stream else self._whole()

    async def _append(self, request: ResponsesRequest, response: ResponseObject, conversation: Conversation) -> bool:
        """Add the response to its conversation. Returns False if that failed. The answer is sent even then."""
        output = [msgspec.json.encode(item) for item in response.output.json()]
        turn = StoredTurn(with_ids(input_items(request.body), self._key), output, response.output.signed())
        return await conversation.append(turn, call_id=self._call_id)

    async def _store(self, request: ResponsesRequest, response: ResponseObject) -> bool:
        """Store the response. Returns False if that failed. The answer is sent even then, with `store` set to false."""
        assert self._tenant_responses is not None
        parts = (request, response)
        document = await in_thread(self._document, *parts) if self.large else self._document(*parts)
        return await self._tenant_responses.put(response.id, document, call_id=self._call_id)

    def _document(self, request: ResponsesRequest, response: ResponseObject) -> Document:
        fields = response.json(response.status)
        output = [msgspec.json.encode(item) for item in fields["output"]]
        turn = StoredTurn(with_ids(input_items(request.body), self._key), output, response.output.signed())
        return document_of(fields, turn, request.history, conversation=request.conversation or "")

    def release(self) -> None:
        if self._tenant_responses is not None:
            self._tenant_responses.release()

    def error_response(self, error: GatewayError) -> tuple[int, bytes] | None:
        """Replace the chat fields in an engine's error by the names of the fields that the client sent."""
        if not isinstance(error, UpstreamRefused):
            return None
        try:
            body: Any = msgspec.json.decode(error.content)
            chat_name = body["error"]["param"]
            client_name = client_field(chat_name)
            body["error"]["param"] = client_name
            whole_word = rf"(?<!\w){re.escape(chat_name)}(?!\w)"
            body["error"]["message"] = re.sub(whole_word, client_name, body["error"]["message"])
        except (msgspec.MsgspecError, RecursionError, LookupError, TypeError, AttributeError):
            return None  # not OpenAI's error object, or it names no field, so it passes unchanged
        return error.upstream_status, msgspec.json.encode(body)

    def error_frames(self, error: GatewayError) -> bytes:
        if self._passed is not None:
            return self._passed.failure(error)
        if self._events is None:  # the reply is a copy of another one
            return error_frame(error)
        return self._events.failure(error)


class InputTokensEndpoint:
    """POST /v1/responses/input_tokens: counts the tokens of a prompt without generating an answer."""

    path: ClassVar[str] = "responses/input_tokens"
    operation: ClassVar[Operation] = Operation.CHAT

    def translator(self, call_id: str) -> InputTokensTranslator:
        return InputTokensTranslator(call_id)

    def read(self, fields: Fields, body: bytes) -> reader.ParsedBody:
        return self.translator("").read(fields, body)


class InputTokensTranslator(ResponsesTranslator):
    """Translates one exchange of POST /v1/responses/input_tokens. Stores nothing, because there is no response."""

    may_run_in_background: ClassVar[bool] = False

    def answer(self, body: bytes) -> bytes:
        tokens = msgspec.json.decode(body)["prompt_tokens"]
        return msgspec.json.encode({"object": "response.input_tokens", "input_tokens": tokens})
