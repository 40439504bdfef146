"""Anthropic's Messages API: POST /v1/messages and /v1/messages/count_tokens, model objects and error format.

`request.py` and `blocks.py` translate a request to a chat request. `reply.py` translates a chat answer to Anthropic's
format. `errors.py` and `context_overflow.py` translate errors. `models.py` has the model objects, and detects which
requests use Anthropic's API. `threads.py` stores conversations, if the policy stores responses.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from functools import partial
from typing import ClassVar

import msgspec

from gateway.core import cache_breakpoints as breakpoints
from gateway.core.errors import BadRequest, GatewayError, ThreadsUnsupported
from gateway.core.native_requests import MESSAGES, NativeRequest
from gateway.core.worker_thread import LARGE_BYTES, in_thread
from gateway.endpoints.chat import read_chat
from gateway.endpoints.messages.errors import error_event, error_response
from gateway.endpoints.messages.headers import headers_of
from gateway.endpoints.messages.models import get_model, is_messages_request, list_models
from gateway.endpoints.messages.reply import MessageEvents, ReplyFormat, message_of
from gateway.endpoints.messages.request import MessagesBody, PromptBody, chat_fields, prompt_fields, shows_thinking
from gateway.endpoints.messages.threads import FIELD_JSON as THREAD_JSON
from gateway.endpoints.messages.threads import ContinueThread, ThreadTurn, thread_of
from gateway.endpoints.untranslated import read_untranslated
from gateway.prompts.reader import ADVISORY_FIELDS, Fields, ParsedBody, decode
from gateway.response_store import StoringTranslator, TenantResponses
from gateway.types import Operation

_messages = msgspec.json.Decoder(MessagesBody)
_prompt = msgspec.json.Decoder(PromptBody)
_encode = msgspec.json.encode
NULL = msgspec.Raw(b"null")
UNSET = (b"null", b'"standard"')
# Fields that do not pass even to Anthropic: threads would be stored under the deployment's key, which all tenants use,
# and the others change what the vendor charges, which no price of the policy depends on.
REFUSED_FIELDS = frozenset({"thread", "speed", "inference_geo"})
HINTS_WITH_BREAKPOINTS = ADVISORY_FIELDS | {breakpoints.FIELD}


class _Translator(ABC):
    """Base class of the translators of both paths: reads a body through `chat_fields`, and makes headers and errors."""

    operation = Operation.CHAT
    api = MESSAGES

    def __init__(self, call_id: str) -> None:
        self._request_id = call_id
        self._passes = False  # the answer has Anthropic's format already

    def read(self, fields: Fields, body: bytes) -> ParsedBody:
        parsed = self._read(fields, body)
        if body.find(breakpoints.FIELD_JSON) < 0:
            return parsed
        # The body is read a second time, with its cache breakpoints, if a deployment supports them.
        return msgspec.structs.replace(
            parsed, with_breakpoints=partial(self._read, fields, body, with_breakpoints=True)
        )

    def _read(self, fields: Fields, body: bytes, *, with_breakpoints: bool = False) -> ParsedBody:
        chat = self.chat_fields(fields, body, with_breakpoints=with_breakpoints)
        hints = HINTS_WITH_BREAKPOINTS if with_breakpoints else ADVISORY_FIELDS
        native = NativeRequest(MESSAGES, fields)
        return msgspec.structs.replace(read_chat(chat, _encode(chat)), hints=hints, native=native)

    def read_native(self, fields: Fields, body: bytes, refusal: BadRequest) -> ParsedBody:
        """Read a body that passes only to deployments with this API. See `NativeReader`."""
        if not REFUSED_FIELDS.isdisjoint(name for name, value in fields.items() if bytes(value) not in UNSET):
            raise refusal
        return read_untranslated(MESSAGES, fields, body, refusal)

    @abstractmethod
    def chat_fields(self, fields: Fields, body: bytes, *, with_breakpoints: bool) -> Fields:
        """Translate a body to the fields of a chat request. Raises `BadRequest`."""

    def pass_answer(self) -> None:
        self._passes = True

    def headers(self, named: Mapping[str, str]) -> Mapping[str, str]:
        return headers_of(named, self._request_id, time.time())

    def error_response(self, error: GatewayError) -> tuple[int, bytes]:
        return error_response(error, self._request_id)

    def error_frames(self, error: GatewayError) -> bytes:
        return error_event(error, self._request_id)


class MessagesTranslator(_Translator, StoringTranslator):
    """Translates one exchange of POST /v1/messages, and stores its turn if it belongs to a thread."""

    def __init__(self, call_id: str) -> None:
        super().__init__(call_id)
        self._format = ReplyFormat(f"msg_{call_id.removeprefix('req_')}")
        self._events: MessageEvents | None = None
        self._thread: ThreadTurn | None = None

    async def load_history(self, body: bytes, tenant_responses: TenantResponses) -> None:
        if body.find(THREAD_JSON) < 0:
            return
        wanted = await in_thread(thread_of, body) if self.large else thread_of(body)
        if wanted is None:
            return
        self._thread = ThreadTurn(tenant_responses.threads, self._request_id)
        if isinstance(wanted, ContinueThread):
            await self._thread.load(wanted.previous_message_id)
            self.large = self.large or self._thread.bytes > LARGE_BYTES

    def read(self, fields: Fields, body: bytes) -> ParsedBody:
        return super().read(*self._whole_conversation(fields, body))

    def read_native(self, fields: Fields, body: bytes, refusal: BadRequest) -> ParsedBody:
        if self._thread is not None:
            fields, body = self._whole_conversation(fields, body)
        return super().read_native(fields, body, refusal)

    def _whole_conversation(self, fields: Fields, body: bytes) -> tuple[Fields, bytes]:
        """Return the request without its thread. Raises `BadRequest`."""
        if fields.get("thread", NULL) == NULL:
            return fields, body
        if self._thread is None:
            raise ThreadsUnsupported("thread: threads are not stored here; send the whole conversation", param="thread")
        whole = self._thread.whole_conversation(fields)
        return whole, _encode(whole)

    def chat_fields(self, fields: Fields, body: bytes, *, with_breakpoints: bool) -> Fields:
        request = decode(_messages, body)
        self._format = msgspec.structs.replace(self._format, shows_thinking=shows_thinking(request.thinking))
        return chat_fields(request, fields, with_breakpoints=with_breakpoints)

    def answer(self, body: bytes) -> bytes:
        answer = body if self._passes else message_of(body, self._format)
        if self._thread is not None:
            self._thread.message.read_message(answer)
            self.must_store = True
        return answer

    def frames(self, chunk: bytes, *, last: bool) -> bytes:
        events = chunk if self._passes else self._events_of(chunk, last=last)
        if self._thread is not None:
            self._thread.message.read(events)
            self.must_store = last
        return events

    def _events_of(self, chunk: bytes, *, last: bool) -> bytes:
        if self._events is None:
            self._events = MessageEvents(self._format)
        return self._events.frames(chunk, last=last)

    async def store_and_finish(self) -> bytes:
        """Store the turn. The exchange then sends the last bytes of the answer, so a client can continue it at once."""
        assert self._thread is not None
        self.must_store = False
        await self._thread.store()
        return b""

    def release(self) -> None:
        if self._thread is not None:
            self._thread.release()

    def error_frames(self, error: GatewayError) -> bytes:
        """Return the unsent events that precede the failed part of the last chunk, followed by the error event."""
        unsent = self._events.unsent if self._events is not None else []
        return b"".join([*unsent, super().error_frames(error)])


class CountTokensTranslator(_Translator):
    """Translates one exchange of POST /v1/messages/count_tokens."""

    def chat_fields(self, fields: Fields, body: bytes, *, with_breakpoints: bool) -> Fields:
        return prompt_fields(decode(_prompt, body), with_breakpoints=with_breakpoints)

    def answer(self, body: bytes) -> bytes:
        return _encode({"input_tokens": msgspec.json.decode(body)["prompt_tokens"]})

    def frames(self, chunk: bytes, *, last: bool) -> bytes:
        raise AssertionError("a token count is never streamed")


class MessagesEndpoint:
    """POST /v1/messages, Anthropic's Messages API."""

    path: ClassVar[str] = "messages"
    operation: ClassVar[Operation] = Operation.CHAT

    def translator(self, call_id: str) -> MessagesTranslator:
        return MessagesTranslator(call_id)

    def read(self, fields: Fields, body: bytes) -> ParsedBody:
        return MessagesTranslator("").read(fields, body)


class CountTokensEndpoint:
    """POST /v1/messages/count_tokens: counts the tokens of a prompt without generating an answer."""

    path: ClassVar[str] = "messages/count_tokens"
    operation: ClassVar[Operation] = Operation.CHAT

    def translator(self, call_id: str) -> CountTokensTranslator:
        return CountTokensTranslator(call_id)

    def read(self, fields: Fields, body: bytes) -> ParsedBody:
        return CountTokensTranslator("").read(fields, body)


__all__ = [
    "CountTokensEndpoint",
    "MessagesEndpoint",
    "MessagesTranslator",
    "error_response",
    "get_model",
    "is_messages_request",
    "list_models",
]
