"""Stored chat completions: a chat with `store: true` is stored when it is complete, if the policy stores responses.

`StoredChat` takes part in the exchange of one chat. It passes the answer on unchanged, notes its chunks, and stores the
completion before the answer's last bytes are sent, so that a client that has the whole answer can retrieve it.

A completion is one document, named by its id. A small document in the folder `index` has what lists are filtered by.
Its name begins with the time, so that the folder is in the order of time.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from gateway.core.errors import GatewayError, StorageUnavailable
from gateway.core.worker_thread import LARGE_BYTES, in_thread
from gateway.endpoints.chat_folding import fold_chat, without_indexes
from gateway.endpoints.exchange import NO_HEADERS, Exchange
from gateway.endpoints.rendering import error_frame
from gateway.prompts.reader import Fields
from gateway.providers.sse import UNREADABLE
from gateway.response_store import ResponseStore, StoringTranslator, TenantResponses
from gateway.storage.base import Document
from gateway.types import Call

Json = dict[str, Any]

INDEX = "index"
MAX_ID_CHARACTERS = 100
# Raised while an answer of another form is read. Values of any type pass to the client, but cannot be stored.
UNREADABLE_ANSWER = (*UNREADABLE, AttributeError, LookupError, TypeError)
NOT_COMPLETE = "the answer is not a chat completion with an id"

log = logging.getLogger("warmpath")


class ChatEntry(msgspec.Struct, frozen=True):
    """The head of a completion's document and of its index document."""

    id: str
    index: str  # name of the index document
    models: tuple[str, ...]  # as asked for, and as the answer says
    metadata: dict[str, str] = {}


class _Body(msgspec.Struct, frozen=True):
    completion: bytes  # JSON, without metadata
    messages: list[bytes]  # of the request, as JSON


_encode = msgspec.msgpack.encode
_entry = msgspec.msgpack.Decoder(ChatEntry).decode
_body = msgspec.msgpack.Decoder(_Body).decode
_object = msgspec.json.Decoder(dict[str, Any]).decode
_messages = msgspec.json.Decoder(list[msgspec.Raw]).decode
_metadata = msgspec.json.Decoder(dict[str, str] | None).decode


def entry_of(head: bytes) -> ChatEntry:
    return _entry(head)


def completion_of(document: Document) -> Json:
    """Return a stored completion as OpenAI's object."""
    return {**_object(_body(document.body).completion), "metadata": _entry(document.head).metadata}


def messages_of(document: Document) -> list[bytes]:
    """Return the messages of the request."""
    return _body(document.body).messages


async def put_chat(chats: TenantResponses, entry: ChatEntry, body: bytes) -> tuple[str, str]:
    """Store a completion and its index document. Returns the outcome and the reason, as `try_to_put`."""
    head = _encode(entry)
    outcome, why = await chats.try_to_put(entry.id, Document(head, body))
    if outcome == "kept":
        outcome, why = await chats.try_to_put(entry.index, Document(head, b""))
    return outcome, why


class StoredChat(StoringTranslator):
    """Stores one chat. The exchange passes the answer through it."""

    def __init__(self, chats: TenantResponses, call: Call) -> None:
        self._chats = chats
        self._call = call
        self._chunks: list[bytes] = []
        self._bytes = 0

    def headers(self, named: Mapping[str, str]) -> Mapping[str, str]:
        return NO_HEADERS

    def pass_answer(self) -> None:
        """The answer passes unchanged in any case."""

    def answer(self, body: bytes) -> bytes:
        self._note(body)
        self.must_store = True
        return body

    def frames(self, chunk: bytes, *, last: bool) -> bytes:
        self._note(chunk)
        self.must_store = last  # not if an error follows
        return chunk

    def error_response(self, error: GatewayError) -> tuple[int, bytes] | None:
        return None

    def error_frames(self, error: GatewayError) -> bytes:
        return error_frame(error)

    async def load_history(self, body: bytes, tenant_responses: TenantResponses) -> None:
        """A chat has no history here."""

    def _note(self, chunk: bytes) -> None:
        """Keep a chunk for later. Above the bound of a response, nothing is kept."""
        self._bytes += len(chunk)
        if self._bytes <= self._chats.max_bytes:
            self._chunks.append(chunk)
        else:
            self._chunks.clear()

    async def store_and_finish(self) -> bytes:
        """Store the completion. A failure is logged, and the answer is sent all the same."""
        self.must_store = False
        outcome, why = "too_large", f"the answer has more than {self._chats.max_bytes} bytes"
        if self._bytes <= self._chats.max_bytes:
            outcome, why = await self._store()
        self._chats.count(outcome)
        if outcome != "kept":
            log.warning("a chat completion was not stored: %s", why, extra={"call_id": self._call.id})
        return b""

    async def _store(self) -> tuple[str, str]:
        parts = (self._chunks, self._call.fields, self._call.stream)
        try:
            large = self._bytes + len(bytes(self._call.fields["messages"])) > LARGE_BYTES
            completion, body = await in_thread(_encoded, *parts) if large else _encoded(*parts)
        except UNREADABLE_ANSWER:
            return "too_large", NOT_COMPLETE
        name = completion.get("id")
        if not isinstance(name, str) or not 0 < len(name) <= MAX_ID_CHARACTERS or "/" in name:
            return "too_large", NOT_COMPLETE
        try:
            (before,) = await self._chats.heads([name])  # an answer from the cache may be stored already
        except StorageUnavailable as error:
            return "storage_away", error.message
        index = f"{INDEX}/{time.time_ns() // 1000:016x}-{name}" if before is None else _entry(before).index
        models = (self._call.asked_model, str(completion["model"]))
        metadata = _metadata(bytes(self._call.fields.get("metadata", b"null"))) or {}
        return await put_chat(self._chats, ChatEntry(name, index, models, metadata), body)

    def release(self) -> None:
        self._chunks.clear()


def store_chat(call: Call, exchange: Exchange, response_store: ResponseStore | None) -> None:
    """Store the answer of a chat with `store: true` when it is complete."""
    responses = None if response_store is None else response_store.of(call.principal.tenant, call.policy)
    if responses is not None:
        chat = StoredChat(responses.chats, call)
        exchange.store_by(chat, chat)


def _encoded(chunks: Sequence[bytes], fields: Fields, stream: bool) -> tuple[Json, bytes]:
    """Return the completion, and the body of its document. Raises `UNREADABLE_ANSWER`."""
    completion = _complete(fold_chat(chunks) if stream else _object(b"".join(chunks)), fields)
    messages = [bytes(message) for message in _messages(fields["messages"])]
    return completion, _encode(_Body(msgspec.json.encode(completion), messages))


def _complete(answer: Json, fields: Fields) -> Json:
    """Add the fields that servers may omit but clients expect."""
    choices = [
        {
            **choice,
            "finish_reason": choice.get("finish_reason") or "stop",
            "logprobs": choice.get("logprobs"),
            "message": {
                "role": "assistant", "content": None, "refusal": None, **without_indexes(choice.get("message") or {}),
            },
        }
        for choice in answer.get("choices") or ()
    ]  # fmt: skip
    known = {name: value for name, value in answer.items() if value is not None}
    return {
        "object": "chat.completion",
        "created": int(time.time()),
        "model": msgspec.json.decode(fields["model"]),
        **known,
        "choices": choices,
    }
