"""Conversations: lists of items that responses read before they begin and extend when they end.

A conversation is a record and a folder of turns. A turn has the items of one response, or those that a client added at
once, and is one document, so that it is added completely or not at all. The name of a turn has the time at which it was
added, so that the folder's order is that of the conversation. Turns of concurrent responses are added in the order in
which they end.

The record is older than the turns, so a storage without room deletes it first, and never a turn from the middle.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from gateway.core.errors import BadRequest, NotFound, StorageUnavailable
from gateway.core.ids import random_bytes
from gateway.endpoints.responses.stored import (
    HISTORY_BYTES_MAX,
    MAX_ID_CHARACTERS,
    RESPONSES_MAX,
    ResponseHistory,
    StoredTurn,
    head_of,
    id_of,
    items_of,
    turn_of,
)
from gateway.response_store import TenantResponses
from gateway.storage.base import Document

Json = dict[str, Any]

TURNS_AT_ONCE = 16  # turns to load before their bytes are counted
DELETED_AT_ONCE = 100
PREFIX = "conv_"
_METADATA = "metadata"  # name, in the folder, of the document with changed metadata; sorts before the turns
_TURN = "t"  # begins the names of turns

log = logging.getLogger("warmpath")


class _Record(msgspec.Struct, frozen=True):
    created_at: int  # seconds since the epoch
    metadata: dict[str, str] = {}


_encode = msgspec.msgpack.encode
_record = msgspec.msgpack.Decoder(_Record).decode
_metadata = msgspec.msgpack.Decoder(dict[str, str]).decode


class Conversation:
    """One conversation of a tenant, which may not exist. `param` is the request's field that names it.

    Methods raise `StorageUnavailable`, and `NotFound` if the conversation does not exist, unless they say otherwise.
    """

    def __init__(self, documents: TenantResponses, conversation_id: str, *, param: str = "id") -> None:
        self.id = conversation_id
        self._documents = documents
        self._param = param
        self._last_us = 0  # time of the last turn that was read, in microseconds since the epoch

    @classmethod
    async def create(cls, documents: TenantResponses, metadata: dict[str, str]) -> Conversation:
        """Create a conversation without items."""
        conversation = cls(documents, f"{PREFIX}{random_bytes(12).hex()}")
        record = Document(_encode(_Record(int(time.time()), metadata)), b"")
        await documents.put_or_raise(conversation.id, record, param=_METADATA)
        return conversation

    async def json(self) -> Json:
        """Return OpenAI's conversation object."""
        self._check_id()
        head, changed = await self._documents.heads([self.id, f"{self.id}/{_METADATA}"])
        if head is None:
            raise self._not_found()
        record = _record(head)
        metadata = record.metadata if changed is None else _metadata(changed)
        return {"id": self.id, "object": "conversation", "created_at": record.created_at, "metadata": metadata}

    async def set_metadata(self, metadata: dict[str, str]) -> Json:
        """Replace the metadata. Returns the conversation object."""
        before = await self.json()
        document = Document(_encode(metadata), b"")
        await self._documents.put_or_raise(f"{self.id}/{_METADATA}", document, param=_METADATA)
        return {**before, "metadata": metadata}

    async def delete(self) -> None:
        """Delete the conversation and all its items."""
        self._check_id()
        if not await self._documents.delete(self.id):
            raise self._not_found()
        while names := await self._documents.names(self.id, limit=DELETED_AT_ONCE):
            for name in names:
                await self._documents.delete(name)

    async def append(self, turn: StoredTurn, *, call_id: str) -> bool:
        """Add a turn. Returns False, with a line in the log, if that is not possible. Raises nothing."""
        try:
            await self.add(turn)
        except (BadRequest, StorageUnavailable) as error:
            log.warning("a response was not added to its conversation: %s", error.message, extra={"call_id": call_id})
            return False
        return True

    async def add(self, turn: StoredTurn) -> None:
        """Add a turn. Raises `BodyTooLarge` too."""
        await self.json()
        self._last_us = max(time.time_ns() // 1000, self._last_us + 1)
        name = f"{self.id}/{_TURN}{self._last_us:016x}{random_bytes(3).hex()}"
        await self._documents.put_or_raise(name, Document(head_of(turn), b""), param="items")
        await self._documents.keep(self.id)

    async def read_history(self, hold: Callable[[int], None]) -> ResponseHistory:
        """Return all items. `hold` reserves memory for them. Raises `BadRequest` and `Overloaded` too."""
        await self.json()
        heads = [head for _, head in await self._turns(hold)]
        items = [item for head in heads for item in items_of(head)]
        return ResponseHistory([], items, sum(map(len, heads)))

    async def items(self) -> list[bytes]:
        """Return all items as clients see them."""
        await self.json()
        return [item for _, head in await self._turns() for item in _visible(turn_of(head))]

    async def find(self, item_id: str) -> tuple[str, StoredTurn, bytes]:
        """Return an item with its turn and the turn's name."""
        await self.json()
        for name, head in reversed(await self._turns()):
            turn = turn_of(head)
            for item in _visible(turn):
                if id_of(item) == item_id:
                    return name, turn, item
        raise NotFound(f"the conversation has no item {item_id[:MAX_ID_CHARACTERS]!r}", param="item_id")

    async def delete_item(self, item_id: str) -> None:
        """Delete one item."""
        name, turn, item = await self.find(item_id)
        rest = StoredTurn(_without(turn.input, item), _without(turn.output, item), turn.signed)
        if rest.input or rest.output:
            await self._documents.put_or_raise(name, Document(head_of(rest), b""), param="item_id")
        else:
            await self._documents.delete(name)

    async def _turns(self, hold: Callable[[int], None] = lambda _: None) -> list[tuple[str, bytes]]:
        """Return all turns, oldest first: the names and the heads of their documents."""
        names = await self._documents.names(self.id, after=f"{self.id}/{_TURN}", limit=RESPONSES_MAX + 1)
        turns: list[tuple[str, bytes]] = []
        size = 0
        for start in range(0, len(names), TURNS_AT_ONCE):
            some = names[start : start + TURNS_AT_ONCE]
            heads = await self._documents.heads(some)
            found = [(name, head) for name, head in zip(some, heads, strict=True) if head is not None]
            held = sum(len(head) for _, head in found)
            size += held
            if len(names) > RESPONSES_MAX or size > HISTORY_BYTES_MAX:
                raise BadRequest(
                    f"{self._param}: a conversation may have at most {RESPONSES_MAX} turns and {HISTORY_BYTES_MAX} "
                    "bytes; delete items, or begin a new one with a summary",
                    param=self._param,
                )
            hold(held)
            turns += found
        if names:
            self._last_us = int(names[-1].removeprefix(f"{self.id}/{_TURN}")[:16], 16)
        return turns

    def _check_id(self) -> None:
        if len(self.id) > MAX_ID_CHARACTERS or not self.id.startswith(PREFIX) or "/" in self.id:
            raise self._not_found()

    def _not_found(self) -> NotFound:
        return NotFound(f"conversation {self.id[:MAX_ID_CHARACTERS]!r} does not exist", param=self._param)


def _visible(turn: StoredTurn) -> Sequence[bytes]:
    return (*turn.input, *turn.output)


def _without(items: list[bytes], item: bytes) -> list[bytes]:
    return [each for each in items if each is not item]
