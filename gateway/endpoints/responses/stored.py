"""Responses as they are kept, and the histories that they make.

A response keeps what was said in its own turn, and the names of all the responses before it. A history is so read in
two steps, however long it is: the last response, then the turns of the others at once. Were the whole history in every
response, one of a hundred turns would be written a hundred times; had each only the name of the one before it, the
storage would be asked a hundred times, one after the other. What a response says back of its request, tools and
instructions among it, often has more bytes than its turn, and is needed only by whoever asks for the response itself:
it is the document's body, and the turn its head.
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

RESPONSES_MAX = 1000  # of one history
HISTORY_BYTES_MAX = 16 * 2**20  # of the turns of one history
MAX_ID_CHARACTERS = 100  # of a name that may be one of ours
PARAM = "previous_response_id"

_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc", "function_call_output": "fco"}


class Turn(msgspec.Struct, frozen=True):
    """What was said to the model and by it: items as JSON."""

    input: list[bytes] = []
    output: list[bytes] = []
    signed: dict[str, str] = {}  # by a reasoning item's id: its `encrypted_content`, which the client was not given


class Told(msgspec.Struct, frozen=True):
    """The rest of a response, as JSON without its output; and the responses before it, the oldest first."""

    response: bytes
    history: list[str] = []
    history_bytes: int = 0  # of the turns, its own included


class History(msgspec.Struct, frozen=True):
    """What a request goes on from."""

    ids: list[str] = []
    items: Sequence[msgspec.Raw] = ()
    bytes: int = 0  # of the turns


class _Named(msgspec.Struct):
    id: str


NO_HISTORY = History()

_encode = msgspec.msgpack.encode
_turn = msgspec.msgpack.Decoder(Turn)
_told = msgspec.msgpack.Decoder(Told)
_named = msgspec.json.Decoder(_Named)


def document_of(response: dict[str, Any], turn: Turn, history: History) -> Document:
    """`response` is what the client is told."""
    head = _encode(turn)
    rest = msgspec.json.encode({name: value for name, value in response.items() if name != "output"})
    return Document(head, _encode(Told(rest, history.ids, history.bytes + len(head))))


def response_of(document: Document) -> bytes:
    """As the client was told."""
    told: dict[str, Any] = msgspec.json.decode(_told.decode(document.body).response, type=dict[str, msgspec.Raw])
    told["output"] = [msgspec.Raw(item) for item in _turn.decode(document.head).output]
    return msgspec.json.encode(told)


def input_of(document: Document) -> list[bytes]:
    """The items of its request, as they came, each with an id."""
    return _turn.decode(document.head).input


async def read_history(response_id: str, tenant_responses: TenantResponses) -> History:
    """What the response was told and has said, from the first of its history on. Raises `BadRequest`,
    `PreviousResponseNotFound`, `Overloaded` and `StorageUnavailable`.
    """
    last = await tenant_responses.get(response_id) if len(response_id) <= MAX_ID_CHARACTERS else None
    if last is None:
        raise PreviousResponseNotFound(
            f"there is no previous response {response_id[:MAX_ID_CHARACTERS]!r}", param=PARAM
        )
    told = _told.decode(last.body)
    ids = [*told.history, response_id]
    if len(ids) > RESPONSES_MAX or told.history_bytes > HISTORY_BYTES_MAX:
        raise BadRequest(
            f"{PARAM}: a history may have {RESPONSES_MAX} responses and {HISTORY_BYTES_MAX} bytes, this one has "
            f"{len(ids)} and {told.history_bytes}; begin anew with what matters of it",
            param=PARAM,
        )
    tenant_responses.hold(told.history_bytes)
    turns: list[Turn] = []
    for name, head in zip(ids, [*await tenant_responses.heads(told.history), last.head], strict=True):
        if head is None:
            raise PreviousResponseNotFound(
                f"of the history of {response_id}, the response {name} is not kept any more", param=PARAM
            )
        turns.append(_turn.decode(head))
    items = [*chain.from_iterable(_items(turn) for turn in turns)]
    return History(ids, items, told.history_bytes)


def items_by_id(head: bytes) -> dict[str, msgspec.Raw]:
    """All that was said in the turn of a document."""
    return {_named.decode(item).id: item for item in _items(_turn.decode(head))}


def _items(turn: Turn) -> list[msgspec.Raw]:
    return [*map(msgspec.Raw, turn.input), *(_with_signature(item, turn) for item in turn.output)]


def _with_signature(item: bytes, turn: Turn) -> msgspec.Raw:
    """What a server has signed it wants to have back, whether or not the client wanted to see it."""
    if turn.signed:
        fields = msgspec.json.decode(item)
        if (signed := turn.signed.get(fields["id"])) is not None:
            return msgspec.Raw(msgspec.json.encode({**fields, "encrypted_content": signed}))
    return msgspec.Raw(item)


def with_ids(items: Sequence[msgspec.Raw], key: str) -> list[bytes]:
    """Items of a request that has been read, each with an id of its own: the client's where it has given one."""
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
