"""OpenAI's /v1/conversations: creates, reads, changes and deletes conversations and their items.

Only the tenant whose key created a conversation can use it. For other tenants it does not exist (404).
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gateway.core.errors import BadRequest
from gateway.core.ids import random_bytes
from gateway.core.native_requests import RESPONSES
from gateway.core.worker_thread import LARGE_BYTES, in_thread
from gateway.endpoints.replies import json_reply
from gateway.endpoints.responses.conversations import Conversation
from gateway.endpoints.responses.item_pages import QUERY_PARAMETERS, complete_item, list_of, page_of
from gateway.endpoints.responses.items import TRANSLATED_TYPES, messages_of
from gateway.endpoints.responses.stored import MAX_ID_CHARACTERS, StoredTurn, with_ids
from gateway.endpoints.responses.strict_json import type_of
from gateway.endpoints.stored_objects import NewMetadata, StoredObjectsApi
from gateway.policy import Policy
from gateway.prompts.reader import Metadata, decode
from gateway.response_store import TenantResponses

Json = dict[str, Any]

ITEMS_MAX = 20  # that one request may add, as at OpenAI
# Accepted and ignored: an item has what it had when it was added.
_INCLUDE = frozenset({"include", "include[]"})

Items = Annotated[list[msgspec.Raw], msgspec.Meta(max_length=ITEMS_MAX)]


class NewConversation(msgspec.Struct):
    """The body of POST /v1/conversations."""

    items: Items | None = None
    metadata: Metadata | None = None


class NewItems(msgspec.Struct):
    """The body of POST /v1/conversations/{id}/items."""

    items: Items


_new_conversation = msgspec.json.Decoder(NewConversation)
_new_items = msgspec.json.Decoder(NewItems)
_new_metadata = msgspec.json.Decoder(NewMetadata)


class ConversationsApi(StoredObjectsApi):
    """Handlers of the routes of conversations."""

    def routes(self) -> list[Route]:
        return [
            Route("/v1/conversations", self._create, methods=["POST"]),
            Route("/v1/conversations/{id}", self._show, methods=["GET"]),
            Route("/v1/conversations/{id}", self._update, methods=["POST"]),
            Route("/v1/conversations/{id}", self._delete, methods=["DELETE"]),
            Route("/v1/conversations/{id}/items", self._add_items, methods=["POST"]),
            Route("/v1/conversations/{id}/items", self._list_items, methods=["GET"]),
            Route("/v1/conversations/{id}/items/{item_id}", self._show_item, methods=["GET"]),
            Route("/v1/conversations/{id}/items/{item_id}", self._delete_item, methods=["DELETE"]),
        ]

    async def _documents(self, request: Request) -> TenantResponses:
        _, _, responses = await self._stored(request, "there are no conversations")
        return responses.conversations

    async def _conversation(self, request: Request) -> Conversation:
        return Conversation(await self._documents(request), request.path_params["id"])

    async def _create(self, request: Request) -> Response:
        documents = await self._documents(request)
        wanted = decode(_new_conversation, await self._body(request, documents) or b"{}")
        turn = await _turn(wanted.items, self._policies.current) if wanted.items else None
        conversation = await Conversation.create(documents, wanted.metadata or {})
        if turn is not None:
            await conversation.add(turn)
        return json_reply(200, await conversation.json())

    async def _show(self, request: Request) -> Response:
        return json_reply(200, await (await self._conversation(request)).json())

    async def _update(self, request: Request) -> Response:
        documents = await self._documents(request)
        conversation = Conversation(documents, request.path_params["id"])
        wanted = decode(_new_metadata, await self._body(request, documents))
        return json_reply(200, await conversation.set_metadata(wanted.metadata))

    async def _delete(self, request: Request) -> Response:
        conversation = await self._conversation(request)
        await conversation.delete()
        return json_reply(200, {"id": conversation.id, "object": "conversation.deleted", "deleted": True})

    async def _add_items(self, request: Request) -> Response:
        documents = await self._documents(request)
        conversation = Conversation(documents, request.path_params["id"])
        wanted = decode(_new_items, await self._body(request, documents))
        if not wanted.items:
            raise BadRequest("items: must have at least one item", param="items")
        turn = await _turn(wanted.items, self._policies.current)
        await conversation.add(turn)
        return json_reply(200, list_of([complete_item(item) for item in turn.input], has_more=False))

    async def _list_items(self, request: Request) -> Response:
        conversation = await self._conversation(request)
        for name in request.query_params:
            if name not in QUERY_PARAMETERS | _INCLUDE:
                shown = name[:MAX_ID_CHARACTERS]
                raise BadRequest(f"{shown}: this parameter is not supported; omit it", param=shown)
        items = await conversation.items()
        return json_reply(200, page_of(items, request.query_params, owner="conversation has no item"))

    async def _show_item(self, request: Request) -> Response:
        _, _, item = await (await self._conversation(request)).find(request.path_params["item_id"])
        return json_reply(200, complete_item(item))

    async def _delete_item(self, request: Request) -> Response:
        conversation = await self._conversation(request)
        await conversation.delete_item(request.path_params["item_id"])
        return json_reply(200, await conversation.json())


async def _turn(items: list[msgspec.Raw], policy: Policy) -> StoredTurn:
    """Return a turn of items that a client adds. Raises `BadRequest`."""
    large = sum(map(len, map(bytes, items))) > LARGE_BYTES
    return await in_thread(_checked_turn, items, policy) if large else _checked_turn(items, policy)


def _checked_turn(items: list[msgspec.Raw], policy: Policy) -> StoredTurn:
    try:
        kinds = [type_of(item, f"input[{number}]", default="message") for number, item in enumerate(items)]
        # Deployments that have the Responses API may know further types of items.
        passes = bool(policy.native_models[RESPONSES])
        checked = [item for item, kind in zip(items, kinds, strict=True) if not passes or kind in TRANSLATED_TYPES]
        messages_of(checked)
    except BadRequest as error:
        path = (error.param or "").replace("input[", "items[", 1)
        raise BadRequest(error.message.replace("input[", "items[", 1), param=path or None) from None
    return StoredTurn(with_ids(items, random_bytes(12).hex()))
