"""The form in which responses are stored, and how a history is loaded from them.

A stored response has the items of its own turn, and the ids of all responses before it. A history of any length is thus
loaded in two steps: the last response, then the turns of all others at once. If each response had the whole history, a
conversation of a hundred turns would be written a hundred times. If each had only the id of the one before it, loading
would take a hundred storage round trips, one after the other.

A response also repeats its request's fields, such as tools and instructions. They often have more bytes than the turn,
and only a client that reads the response itself needs them. So they are the document's body, and the turn is its head,
which can be loaded alone. Both are msgpack maps: renaming a field of `StoredTurn` or `StoredBody` would make stored
responses unreadable.
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

RESPONSES_MAX = 1000  # responses of one history
HISTORY_BYTES_MAX = 16 * 2**20  # bytes of the turns of one history
MAX_ID_CHARACTERS = 100  # a longer id cannot be one of ours
PARAM = "previous_response_id"

# Prefixes of the ids that items of a request get, by the item's type.
_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc", "function_call_output": "fco"}


class StoredTurn(msgspec.Struct, frozen=True):
    """The items of one turn as JSON: those of the request, and those of the answer."""

    input: list[bytes] = []
    output: list[bytes] = []
    signed: dict[str, str] = {}  # `encrypted_content` that the client did not get, by the reasoning item's id


class StoredBody(msgspec.Struct, frozen=True):
    """The rest of a response: its JSON without `output`, and the ids of the responses before it, oldest first."""

    response: bytes
    history: list[str] = []
    history_bytes: int = 0  # of all turns, its own included


class ResponseHistory(msgspec.Struct, frozen=True):
    """The conversation that a request continues: response ids and their items, oldest first."""

    ids: list[str] = []
    items: Sequence[msgspec.Raw] = ()
    bytes: int = 0  # of the turns


class _ItemId(msgspec.Struct):
    id: str


NO_HISTORY = ResponseHistory()

_encode = msgspec.msgpack.encode
_turn = msgspec.msgpack.Decoder(StoredTurn)
_stored_body = msgspec.msgpack.Decoder(StoredBody)
_item_id = msgspec.json.Decoder(_ItemId)


def document_of(response: dict[str, Any], turn: StoredTurn, history: ResponseHistory) -> Document:
    """Return the document to store for a response, as the client gets it, that continues `history`."""
    head = _encode(turn)
    rest = msgspec.json.encode({name: value for name, value in response.items() if name != "output"})
    return Document(head, _encode(StoredBody(rest, history.ids, history.bytes + len(head))))


def response_of(document: Document) -> bytes:
    """Return a stored response as JSON, as its client got it."""
    response: dict[str, Any] = msgspec.json.decode(
        _stored_body.decode(document.body).response, type=dict[str, msgspec.Raw]
    )
    response["output"] = [msgspec.Raw(item) for item in _turn.decode(document.head).output]
    return msgspec.json.encode(response)


def input_of(document: Document) -> list[bytes]:
    """Return the items of a stored response's request, as the client sent them, each with an id."""
    return _turn.decode(document.head).input


async def read_history(response_id: str, tenant_responses: TenantResponses) -> ResponseHistory:
    """Load the conversation that ends with the response `response_id`.

    Its memory is held by `tenant_responses`. Raises `BadRequest`, `PreviousResponseNotFound`, `Overloaded` and
    `StorageUnavailable`.
    """
    last = await tenant_responses.get(response_id) if len(response_id) <= MAX_ID_CHARACTERS else None
    if last is None:
        raise PreviousResponseNotFound(
            f"the previous response {response_id[:MAX_ID_CHARACTERS]!r} does not exist", param=PARAM
        )
    body = _stored_body.decode(last.body)
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


def items_by_id(head: bytes) -> dict[str, msgspec.Raw]:
    """Return all items of a document's turn, by id."""
    return {_item_id.decode(item).id: item for item in _items(_turn.decode(head))}


def _items(turn: StoredTurn) -> list[msgspec.Raw]:
    return [*map(msgspec.Raw, turn.input), *(_with_signature(item, turn) for item in turn.output)]


def _with_signature(item: bytes, turn: StoredTurn) -> msgspec.Raw:
    """Add signed thinking back to an item: its deployment needs it, even if the client did not ask to see it."""
    if turn.signed:
        fields = msgspec.json.decode(item)
        if (signed := turn.signed.get(fields["id"])) is not None:
            return msgspec.Raw(msgspec.json.encode({**fields, "encrypted_content": signed}))
    return msgspec.Raw(item)


def with_ids(items: Sequence[msgspec.Raw], key: str) -> list[bytes]:
    """Return the items of a valid request, each with a unique id: the client's if it is given and unused.

    `key` is the response's key, with which the other ids begin.
    """
    named: list[bytes] = []
    taken = set[str]()
    for number, item in enumerate(items):
        fields = read_fields(bytes(item))
        given = msgspec.json.decode(fields["id"]) if "id" in fields else None
        if not isinstance(given, str) or not given or given in taken:
            kind = msgspec.json.decode(fields["type"]) if "type" in fields else None
            given = f"{_PREFIXES.get(kind or 'message', 'item')}_{key}i{number:x}"
        taken.add(given)
        fields["id"] = msgspec.Raw(msgspec.json.encode(given))
        named.append(msgspec.json.encode(fields))
    return named
