"""Threads: conversations of the Messages API that are stored, so that a request has only the new messages.

A request with `thread: {"type": "create"}` has the whole conversation. A request with `{"type": "continue",
"previous_message_id": ...}` continues the message with this id: the gateway puts the stored conversation before its
messages, and the thread's `system` and `tools` beside them. From there on it is a request like any other. Each message
is continued once. If a thread cannot be used, an error code tells Anthropic's SDKs to begin a new one with the whole
conversation.

A turn is one document, named by the id of the message that answers it. Its head has the messages of the request and the
content of the answer; the first turn's head also has `system` and `tools`. Its body has the ids of the turns before it.
While a request continues a turn, it has a claim on it, so that no other request can, at any gateway.
"""

from __future__ import annotations

import logging

import msgspec

from gateway.core.errors import (
    BadRequest,
    ThreadAlreadyContinued,
    ThreadContinueInFlight,
    ThreadFingerprintMismatch,
    ThreadNotFound,
    ThreadsUnsupported,
)
from gateway.core.worker_thread import LARGE_BYTES, in_thread
from gateway.endpoints.messages.folding import FoldedMessage
from gateway.prompts.reader import Fields, decode
from gateway.response_store import Claim, TenantResponses
from gateway.storage.base import Document

FIELD = "thread"
FIELD_JSON = b'"thread"'
PARAM = "thread.previous_message_id"
TURNS_MAX = 1000  # of one thread
HISTORY_BYTES_MAX = 16 * 2**20  # of all turns of one thread
MAX_ID_CHARACTERS = 100  # of a message's id
CLAIM_SECONDS = 600.0  # after the death of a gateway, a turn that it continued can be continued after this time
KEPT_FIELDS = ("system", "tools")  # of the request that created the thread; later requests have none
# Fields whose effect on a stored conversation is not defined.
UNSUPPORTED_FIELDS = ("compaction", "context_management", "fallbacks")
REFUSED = "refusal"  # the stop reason of an answer that no client continues
NOTHING = (b"null", b"[]", b"{}")
BREAKPOINT = "cache_control"
BREAKPOINT_JSON = b'"cache_control"'
HOLDERS = ("content", "source")  # fields of blocks that hold further blocks

log = logging.getLogger("warmpath")


class CreateThread(msgspec.Struct, forbid_unknown_fields=True, tag_field="type", tag="create"):
    """The conversation is to be stored."""


class ContinueThread(msgspec.Struct, forbid_unknown_fields=True, tag_field="type", tag="continue"):
    """The request continues a stored message."""

    previous_message_id: str


class _Body(msgspec.Struct):
    thread: CreateThread | ContinueThread | None = None


class _Turn(msgspec.Struct, frozen=True):
    """Head of a turn's document, all JSON: the request's messages, the answer's content, and the thread's fields."""

    messages: list[bytes]
    content: bytes
    kept: dict[str, bytes] = {}  # only in the first turn


class _Position(msgspec.Struct, frozen=True):
    """Body of a turn's document: the ids of earlier turns, oldest first, and the bytes of all turns."""

    history: list[str]
    history_bytes: int
    continued: bool = False


_thread_of = msgspec.json.Decoder(_Body)
_turn = msgspec.msgpack.Decoder(_Turn).decode
_position = msgspec.msgpack.Decoder(_Position).decode
_encode = msgspec.msgpack.encode
_json = msgspec.json.encode
_raws = msgspec.json.Decoder(list[msgspec.Raw])
_object = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


class ThreadTurn:
    """One request of a thread, and its answer, which is stored when it is complete."""

    def __init__(self, threads: TenantResponses, call_id: str) -> None:
        self.bytes = 0  # of the history
        self.message = FoldedMessage(threads.max_bytes)
        self._threads = threads
        self._call_id = call_id
        self._claim: Claim | None = None
        self._previous: tuple[str, Document] | None = None
        self._ids: list[str] = []  # of earlier turns
        self._history: list[msgspec.Raw] = []  # messages
        self._kept: dict[str, bytes] = {}
        self._given: list[bytes] = []  # messages of this request

    async def load(self, name: str) -> None:
        """Claim the turn that this request continues, and load all turns up to it.

        Raises `ThreadNotFound`, `ThreadContinueInFlight`, `ThreadAlreadyContinued`, `Overloaded` and
        `StorageUnavailable`.
        """
        if not 0 < len(name) <= MAX_ID_CHARACTERS or "/" in name:
            raise _not_found(name, "no thread has this message")
        self._claim = await self._threads.claim(name, lease_seconds=CLAIM_SECONDS)
        if self._claim is None:
            message = f"{PARAM}: another request continues {name!r}; wait for its answer, and continue that one"
            raise ThreadContinueInFlight(message, param=PARAM)
        document = await self._threads.get(name)  # read after the claim, so that it has what its last holder stored
        if document is None:
            raise _not_found(name, "no thread has this message")
        position = _position(document.body)
        if position.continued:
            message = f"{PARAM}: {name!r} was continued before; continue the thread's last message"
            raise ThreadAlreadyContinued(message, param=PARAM)
        if len(position.history) >= TURNS_MAX or position.history_bytes > HISTORY_BYTES_MAX:
            raise _not_found(name, f"its thread has more than {TURNS_MAX} turns or {HISTORY_BYTES_MAX} bytes")
        self._threads.hold(position.history_bytes)
        heads = [*await self._threads.heads(position.history), document.head]
        for head in heads:
            if head is None:
                raise _not_found(name, "a part of its thread is no longer stored")
            turn = _turn(head)
            self._kept |= turn.kept
            self._history += map(msgspec.Raw, turn.messages)
            if turn.content != b"[]":
                self._history.append(msgspec.Raw(b'{"role":"assistant","content":%b}' % turn.content))
        self._previous, self._ids = (name, document), [*position.history, name]
        self.bytes = position.history_bytes

    def whole_conversation(self, fields: Fields) -> Fields:
        """Return the fields of the same request without a thread. Raises `BadRequest`."""
        unsupported = [name for name in UNSUPPORTED_FIELDS if _is_given(fields, name)]
        if unsupported:
            message = f"{FIELD}: cannot be combined with {', '.join(unsupported)}; send the whole conversation instead"
            raise ThreadsUnsupported(message, param=FIELD, unsupported=unsupported)
        messages = _messages_of(fields)
        self._given = [_plain(bytes(message)) for message in messages]
        rest = {name: value for name, value in fields.items() if name != FIELD}
        if self._previous is None:
            self._kept = {name: bytes(fields[name]) for name in KEPT_FIELDS if _is_given(fields, name)}
            return rest
        self._check_kept(fields)
        rest |= {name: msgspec.Raw(value) for name, value in self._kept.items()}
        return rest | {"messages": msgspec.Raw(_json([*self._history, *messages]))}

    def _check_kept(self, fields: Fields) -> None:
        given = [name for name in KEPT_FIELDS if _is_given(fields, name)]
        others = [name for name in given if bytes(fields[name]) != self._kept.get(name)]
        if others:
            message = f"{others[0]}: {' and '.join(others)} differ from the thread's; begin a new thread to change them"
            raise ThreadFingerprintMismatch(message, param=others[0])
        if given:
            raise BadRequest(f"{given[0]}: the thread has this field; omit it", param=given[0])

    async def store(self) -> None:
        """Store the turn. A failure is logged, and the answer is sent all the same."""
        message = self.message
        name = message.id
        if not message.is_complete or not 0 < len(name) <= MAX_ID_CHARACTERS or "/" in name:
            self._threads.count("too_large")
            log.warning("a message was not stored: it is too long or malformed", extra={"call_id": self._call_id})
            return
        if message.stop_reason == REFUSED:
            return
        large = sum(map(len, self._given)) > LARGE_BYTES
        document = await in_thread(self._document) if large else self._document()
        if await self._threads.put(name, document, call_id=self._call_id) and self._previous is not None:
            before, old = self._previous
            body = _encode(msgspec.structs.replace(_position(old.body), continued=True))
            await self._threads.try_to_put(before, Document(old.head, body))

    def _document(self) -> Document:
        kept = self._kept if self._previous is None else {}
        head = _encode(_Turn(self._given, _json(self.message.content), kept))
        return Document(head, _encode(_Position(self._ids, self.bytes + len(head))))

    def release(self) -> None:
        """Release the memory and the claim. Safe to call twice."""
        self._threads.release()
        claim, self._claim = self._claim, None
        if claim is not None:
            claim.release()


def thread_of(body: bytes) -> CreateThread | ContinueThread | None:
    """Return the thread of a request's body. Raises `BadRequest`."""
    return decode(_thread_of, body).thread


def _not_found(name: str, why: str) -> ThreadNotFound:
    message = f"{PARAM}: {name[:MAX_ID_CHARACTERS]!r} cannot be continued, because {why}; send the whole conversation"
    return ThreadNotFound(message, param=PARAM)


def _messages_of(fields: Fields) -> list[msgspec.Raw]:
    try:
        return decode(_raws, bytes(fields.get("messages", b"[]")))
    except BadRequest as error:
        raise BadRequest(f"messages: {error.message}", param="messages") from None


def _is_given(fields: Fields, name: str) -> bool:
    return name in fields and bytes(fields[name]) not in NOTHING


def _plain(value: bytes) -> bytes:
    """Remove a message's cache breakpoints: a request may have only a few, and its new messages use them."""
    try:
        return _without_breakpoints(value)
    except (msgspec.MsgspecError, ValueError, RecursionError):  # the request is rejected later
        return value


def _without_breakpoints(value: bytes) -> bytes:
    if BREAKPOINT_JSON not in value:
        return value
    if value.startswith(b"["):
        return _json([msgspec.Raw(_without_breakpoints(bytes(each))) for each in _raws.decode(value)])
    return _json(
        {
            name: msgspec.Raw(_without_breakpoints(bytes(each))) if name in HOLDERS else each
            for name, each in _object(value).items()
            if name != BREAKPOINT
        }
    )
