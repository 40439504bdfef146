"""OpenAI's routes of stored chat completions: lists, reads, changes and deletes them, and lists their messages.

Only the tenant whose key created a completion can use it. For other tenants it does not exist (404).
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Mapping
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gateway.core.errors import BadRequest, NotFound
from gateway.core.numbers import whole_number
from gateway.endpoints.replies import json_reply
from gateway.endpoints.responses.item_pages import PAGE, PAGE_MAX, list_of
from gateway.endpoints.stored_chats import (
    INDEX,
    MAX_ID_CHARACTERS,
    ChatEntry,
    completion_of,
    entry_of,
    messages_of,
    put_chat,
)
from gateway.endpoints.stored_objects import NewMetadata, StoredObjectsApi
from gateway.prompts.reader import decode
from gateway.response_store import TenantResponses
from gateway.storage.base import Document

Json = dict[str, Any]

ENTRIES_AT_ONCE = 100  # index documents that are read by one storage operation
ENTRIES_MAX = 10_000  # index documents that one list reads
PAGE_BYTES_MAX = 8 * 2**20  # of the completions in one page; a longer page ends sooner
_LIST_PARAMETERS = frozenset({"limit", "order", "after", "model"})
_METADATA = re.compile(r"metadata\[(.{1,64})\]", re.DOTALL)

_new_metadata = msgspec.json.Decoder(NewMetadata)


class StoredChatsApi(StoredObjectsApi):
    """Handlers of the routes of stored chat completions."""

    def routes(self) -> list[Route]:
        return [
            Route("/v1/chat/completions", self._list, methods=["GET"]),
            Route("/v1/chat/completions/{id}", self._show, methods=["GET"]),
            Route("/v1/chat/completions/{id}", self._update, methods=["POST"]),
            Route("/v1/chat/completions/{id}", self._delete, methods=["DELETE"]),
            Route("/v1/chat/completions/{id}/messages", self._messages, methods=["GET"]),
        ]

    async def _chats(self, request: Request) -> TenantResponses:
        _, _, responses = await self._stored(request, "no chat completions are stored")
        return responses.chats

    async def _find(self, request: Request) -> tuple[TenantResponses, Document]:
        chats, name = await self._chats(request), request.path_params["id"]
        document = await chats.get(name) if len(name) <= MAX_ID_CHARACTERS else None
        if document is None:
            raise NotFound(f"chat completion {name[:MAX_ID_CHARACTERS]!r} does not exist", param="id")
        return chats, document

    async def _show(self, request: Request) -> Response:
        return json_reply(200, completion_of((await self._find(request))[1]))

    async def _update(self, request: Request) -> Response:
        chats, document = await self._find(request)
        wanted = decode(_new_metadata, await self._body(request, chats))
        entry = msgspec.structs.replace(entry_of(document.head), metadata=wanted.metadata)
        outcome, why = await put_chat(chats, entry, document.body)
        chats.check(outcome, why, param="metadata")
        return json_reply(200, {**completion_of(document), "metadata": wanted.metadata})

    async def _delete(self, request: Request) -> Response:
        chats, document = await self._find(request)
        entry = entry_of(document.head)
        await chats.delete(entry.index)
        await chats.delete(entry.id)
        return json_reply(200, {"id": entry.id, "object": "chat.completion.deleted", "deleted": True})

    async def _messages(self, request: Request) -> Response:
        _, document = await self._find(request)
        limit, descending, after = _page_parameters(request, frozenset({"limit", "order", "after"}))
        name = entry_of(document.head).id
        messages = [_message(f"{name}-{number}", raw) for number, raw in enumerate(messages_of(document))]
        if descending:
            messages.reverse()
        if after is not None:
            position = next((number for number, each in enumerate(messages) if each["id"] == after), None)
            if position is None:
                raise BadRequest(f"after: the completion has no message {after[:MAX_ID_CHARACTERS]!r}", param="after")
            messages = messages[position + 1 :]
        return json_reply(200, list_of(messages[:limit], has_more=len(messages) > limit))

    async def _list(self, request: Request) -> Response:
        chats = await self._chats(request)
        limit, descending, after = _page_parameters(request, _LIST_PARAMETERS)
        start = None if after is None else await _index_of(chats, after)
        page: list[Json] = []
        size = 0
        async for entry in _entries(chats, start, request.query_params, newest_first=descending):
            document = await chats.get(entry.id)
            if document is None:  # the storage had no room for it
                continue
            size += len(document.body)
            if len(page) == limit or (page and size > PAGE_BYTES_MAX):
                return json_reply(200, list_of(page, has_more=True))
            page.append(completion_of(document))
        return json_reply(200, list_of(page, has_more=False))


async def _entries(
    chats: TenantResponses, after: str | None, query: Mapping[str, str], *, newest_first: bool
) -> AsyncIterator[ChatEntry]:
    """Yield the entries that match the query, in order. Raises `BadRequest` if there are too many others."""
    model = query.get("model")
    metadata = {match[1]: value for name, value in query.items() if (match := _METADATA.fullmatch(name))}
    read = 0
    while names := await chats.names(INDEX, after=after, limit=ENTRIES_AT_ONCE, newest_first=newest_first):
        for head in await chats.heads(names):
            entry = None if head is None else entry_of(head)
            if entry is None or (model is not None and model not in entry.models):
                continue
            if metadata.items() <= entry.metadata.items():
                yield entry
        after, read = names[-1], read + len(names)
        if read >= ENTRIES_MAX:
            raise BadRequest(f"after: one list reads at most {ENTRIES_MAX} completions; begin it later", param="after")


async def _index_of(chats: TenantResponses, name: str) -> str:
    """Return the name of a completion's index document."""
    (head,) = await chats.heads([name]) if len(name) <= MAX_ID_CHARACTERS else [None]
    if head is None:
        raise BadRequest(f"after: there is no chat completion {name[:MAX_ID_CHARACTERS]!r}", param="after")
    return entry_of(head).index


def _page_parameters(request: Request, known: frozenset[str]) -> tuple[int, bool, str | None]:
    """Return the limit, whether the order is descending, and the id after which the page begins."""
    query = request.query_params
    for name in query:
        if name not in known and not ("model" in known and _METADATA.fullmatch(name)):
            shown = name[:MAX_ID_CHARACTERS]
            raise BadRequest(f"{shown}: this parameter is not supported; omit it", param=shown)
    order = query.get("order", "asc")
    if order not in ("asc", "desc"):
        raise BadRequest("order: must be asc or desc", param="order")
    limit = whole_number(query.get("limit", str(PAGE)), "limit", minimum=1, maximum=PAGE_MAX)
    return limit, order == "desc", query.get("after")


def _message(name: str, raw: bytes) -> Json:
    """Return a message of a request in the form of the list."""
    message: Json = msgspec.json.decode(raw)
    parts = message.get("content")
    if not isinstance(parts, list):
        return {"content": None, "refusal": None, **message, "id": name, "content_parts": None}
    texts = [part["text"] for part in parts if isinstance(part, dict) and isinstance(part.get("text"), str)]
    known = [part for part in parts if isinstance(part, dict) and part.get("type") in ("text", "image_url")]
    return {"refusal": None, **message, "id": name, "content": "".join(texts), "content_parts": known}
