"""Converts responses to stored documents, and loads a conversation's history from stored responses.

A stored response has its own turn (the items of one request and its answer) and the ids of all responses before it. A
history of any length is therefore loaded in two steps: the last response, then the turns of all others at once. If each
response contained the complete history, a conversation of 100 turns would be written 100 times. If each response
contained only the id of the previous one, loading would take 100 consecutive storage round trips.

A response also repeats fields of its request, such as tools and instructions. These fields are often larger than the
turn, and only a client that reads the response itself needs them. They are therefore the document's body. The turn is
the document's head, which can be loaded alone. Both are msgpack maps, so renaming a field of `StoredTurn` or
`StoredBody` would make stored responses unreadable.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import msgspec

from gateway.core.errors import BadRequest, PreviousResponseNotFound
from gateway.prompts.reader import read_fields
from gateway.response_store import TenantResponses
from gateway.storage.base import Document

RESPONSES_MAX = 1000  # most responses in one history
HISTORY_BYTES_MAX = 16 * 2**20  # most bytes of all turns in one history
MAX_ID_CHARACTERS = 100  # the gateway makes no longer ids
PARAM = "previous_response_id"
FAILED = "failed"

# Prefixes of the ids that the gateway gives to the items of a request, by the item's type.
_PREFIXES = {
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "function_call_output": "fco",
    "compaction": "cmp",
}


class StoredTurn(msgspec.Struct, frozen=True):
    """The items of one request and its answer, as JSON."""

    input: list[bytes] = []
    output: list[bytes] = []
    signed: dict[str, str] = {}  # `encrypted_content` that the client did not receive, by reasoning item id


class StoredBody(msgspec.Struct, frozen=True):
    """The other fields of a response as JSON, without `output`, and the ids of earlier responses, oldest first."""

    response: bytes
    history: list[str] = []
    history_bytes: int = 0  # bytes of all turns, including this response's
    state: str = ""  # status of a response in the background that has no complete answer, such as in_progress
    conversation: str = ""  # id of the conversation to which the response belongs


class ResponseHistory(msgspec.Struct, frozen=True):
    """The conversation that a request continues: the ids of the responses and all their items, oldest first."""

    ids: list[str] = []
    items: Sequence[msgspec.Raw] = ()
    bytes: int = 0  # bytes of all turns


class _ItemId(msgspec.Struct):
    id: str


NO_HISTORY = ResponseHistory()

_encode = msgspec.msgpack.encode
_turn = msgspec.msgpack.Decoder(StoredTurn)
_stored_body = msgspec.msgpack.Decoder(StoredBody)
_item_id = msgspec.json.Decoder(_ItemId)


def document_of(
    response: dict[str, Any],
    turn: StoredTurn,
    history: ResponseHistory,
    *,
    state: str = "",
    conversation: str = "",
) -> Document:
    """Return the document to store for a response that continues `history`. The others are those of `StoredBody`."""
    head = _encode(turn)
    rest = msgspec.json.encode({name: value for name, value in response.items() if name != "output"})
    return Document(head, _encode(StoredBody(rest, history.ids, history.bytes + len(head), state, conversation)))


def state_of(document: Document) -> str:
    """Return the status of a response in the background that has no complete answer. Else ""."""
    return _stored_body.decode(document.body).state


def failed_document(document: Document, message: str) -> Document:
    """Return the document of a response in the background with the status `failed`."""
    body = _stored_body.decode(document.body)
    fields = msgspec.json.decode(body.response, type=dict[str, Any])
    fields |= {"status": FAILED, "error": {"code": "server_error", "message": message}}
    failed = msgspec.structs.replace(body, response=msgspec.json.encode(fields), state=FAILED)
    return Document(document.head, _encode(failed))


def response_of(document: Document) -> bytes:
    """Return a stored response as the JSON that the client received."""
    response: dict[str, Any] = msgspec.json.decode(
        _stored_body.decode(document.body).response, type=dict[str, msgspec.Raw]
    )
    response["output"] = [msgspec.Raw(item) for item in _turn.decode(document.head).output]
    return msgspec.json.encode(response)


def input_of(document: Document) -> list[bytes]:
    """Return the input items of a stored response as the client sent them, each with an id."""
    return _turn.decode(document.head).input


async def read_history(response_id: str, tenant_responses: TenantResponses) -> ResponseHistory:
    """Load the conversation that ends with the response `response_id`.

    `tenant_responses` reserves the memory for the history. Raises `BadRequest`, `PreviousResponseNotFound`,
    `Overloaded` and `StorageUnavailable`.
    """
    last = await tenant_responses.get(response_id) if len(response_id) <= MAX_ID_CHARACTERS else None
    if last is None:
        raise PreviousResponseNotFound(
            f"the previous response {response_id[:MAX_ID_CHARACTERS]!r} does not exist", param=PARAM
        )
    body = _stored_body.decode(last.body)
    if body.state:
        raise BadRequest(f"{PARAM}: the response {response_id} is {body.state}, so it cannot be continued", param=PARAM)
    if body.conversation:
        raise BadRequest(
            f"{PARAM}: the response {response_id} belongs to the conversation {body.conversation}; "
            "pass `conversation` instead",
            param=PARAM,
        )
    ids = [*body.history, response_id]
    if len(ids) > RESPONSES_MAX or body.history_bytes > HISTORY_BYTES_MAX:
        raise BadRequest(
            f"{PARAM}: a history may have at most {RESPONSES_MAX} responses and {HISTORY_BYTES_MAX} bytes, but this "
            f"one has {len(ids)} and {body.history_bytes}; start a new one with a summary as `input`",
            param=PARAM,
        )
    tenant_responses.hold(body.history_bytes)
    turns: list[StoredTurn] = []
    for name, head in zip(ids, [*await tenant_responses.heads(body.history), last.head], strict=True):
        if head is None:
            raise PreviousResponseNotFound(
                f"the response {name} in the history of {response_id} is no longer stored", param=PARAM
            )
        turns.append(_turn.decode(head))
    items = [*chain.from_iterable(_items(turn) for turn in turns)]
    return ResponseHistory(ids, items, body.history_bytes)


def items_of(head: bytes) -> list[msgspec.Raw]:
    """Return all items of a turn. `head` is the document's head."""
    return _items(_turn.decode(head))


def head_of(turn: StoredTurn) -> bytes:
    """Return the head of a turn's document."""
    return _encode(turn)


def turn_of(head: bytes) -> StoredTurn:
    """Return the turn in a document's head."""
    return _turn.decode(head)


def id_of(item: bytes) -> str:
    """Return the id of a stored item."""
    return _item_id.decode(item).id


def items_by_id(head: bytes) -> dict[str, msgspec.Raw]:
    """Return all items of a stored response's turn, by id. `head` is the document's head."""
    return {_item_id.decode(item).id: item for item in _items(_turn.decode(head))}


def _items(turn: StoredTurn) -> list[msgspec.Raw]:
    return [*map(msgspec.Raw, turn.input), *(_with_signature(item, turn) for item in turn.output)]


def _with_signature(item: bytes, turn: StoredTurn) -> msgspec.Raw:
    """Add the signed thinking to an item. The deployment needs it even if the client did not ask to see it."""
    if turn.signed:
        fields = msgspec.json.decode(item)
        if (signed := turn.signed.get(fields["id"])) is not None:
            return msgspec.Raw(msgspec.json.encode({**fields, "encrypted_content": signed}))
    return msgspec.Raw(item)


def with_ids(items: Sequence[msgspec.Raw], key: str) -> list[bytes]:
    """Return the items of a valid request, each with a unique id.

    An item keeps the client's id if that id is unused. Otherwise the item gets an id that contains `key`, the key of
    the response.
    """
    named: list[bytes] = []
    taken = set[str]()
    for number, item in enumerate(items):
        fields = read_fields(bytes(item))
        given = msgspec.json.decode(fields["id"]) if "id" in fields else None
        if not isinstance(given, str) or not given or given in taken:
            kind = msgspec.json.decode(fields["type"]) if "type" in fields else None
            known = kind if isinstance(kind, str) else "message"
            given = f"{_PREFIXES.get(known or 'message', 'item')}_{key}i{number:x}"
        taken.add(given)
        fields["id"] = msgspec.Raw(msgspec.json.encode(given))
        named.append(msgspec.json.encode(fields))
    return named
