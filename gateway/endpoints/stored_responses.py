"""GET and DELETE /v1/responses/{id}, its cancellation, and its input items: reads and deletes stored responses.

Only the tenant whose key created a response can use it. For other tenants the response does not exist (404).
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import NamedTuple, Protocol

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from gateway.auth.authenticator import Authenticator
from gateway.core.errors import BadRequest, NotFound
from gateway.core.numbers import whole_number
from gateway.endpoints.replies import json_reply
from gateway.endpoints.responses.item_pages import QUERY_PARAMETERS, page_of
from gateway.endpoints.responses.stored import MAX_ID_CHARACTERS, input_of, response_of
from gateway.endpoints.stored_objects import StoredObjectsApi
from gateway.endpoints.wire import STREAM_TYPE
from gateway.policy import Policy, Tenant
from gateway.policy.file import PolicyHolder
from gateway.response_store import ResponseStore, TenantResponses
from gateway.storage.base import Document

EVENT_NUMBER_MAX = 10**9
_QUERY = frozenset({"include_obfuscation"})  # accepted and ignored: the stored events are as they were sent


class BackgroundResponses(Protocol):
    """The responses in the background, of which some are not finished. See `gateway.background`."""

    async def current(self, tenant: Tenant, responses: TenantResponses, name: str, document: Document) -> Document:
        """Return the document of a response as it is now."""

    async def cancel(self, tenant: Tenant, responses: TenantResponses, name: str, document: Document) -> Document:
        """Cancel a response, and return its document."""

    async def delete(self, tenant: Tenant, responses: TenantResponses, name: str, document: Document) -> None:
        """Prepare the deletion of a response."""

    async def stream(
        self, policy: Policy, tenant: Tenant, name: str, document: Document, *, after: int
    ) -> AsyncIterator[bytes]:
        """Return the events of a response with numbers above `after`."""


class _Found(NamedTuple):
    """A stored response that the client may use."""

    policy: Policy
    tenant: Tenant
    responses: TenantResponses
    name: str
    document: Document


class StoredResponsesApi(StoredObjectsApi):
    """Handlers of the routes that read, cancel and delete stored responses."""

    def __init__(
        self,
        authenticator: Authenticator,
        policies: PolicyHolder,
        response_store: ResponseStore,
        background: BackgroundResponses,
    ) -> None:
        super().__init__(authenticator, policies, response_store)
        self._background = background

    def routes(self) -> list[Route]:
        return [
            Route("/v1/responses/{id}", self._show, methods=["GET"]),
            Route("/v1/responses/{id}", self._delete, methods=["DELETE"]),
            Route("/v1/responses/{id}/cancel", self._cancel, methods=["POST"]),
            Route("/v1/responses/{id}/input_items", self._input_items, methods=["GET"]),
        ]

    async def _find(self, request: Request) -> _Found:
        policy, tenant, responses = await self._stored(request, f"response {_name(request)!r} does not exist")
        name = request.path_params["id"]
        document = await responses.get(name) if len(name) <= MAX_ID_CHARACTERS else None
        if document is None:
            raise _not_found(request)
        return _Found(policy, tenant, responses, name, document)

    async def _show(self, request: Request) -> Response:
        found = await self._find(request)
        streams = request.query_params.get("stream") == "true"
        _check_query(request, _QUERY | {"stream", "starting_after"} if streams else _QUERY)
        document = await self._background.current(found.tenant, found.responses, found.name, found.document)
        if not streams:
            return Response(response_of(document), media_type="application/json")
        given = request.query_params.get("starting_after")
        after = -1 if given is None else whole_number(given, "starting_after", minimum=0, maximum=EVENT_NUMBER_MAX)
        frames = await self._background.stream(found.policy, found.tenant, found.name, document, after=after)
        return StreamingResponse(frames, headers={"content-type": STREAM_TYPE})

    async def _cancel(self, request: Request) -> Response:
        found = await self._find(request)
        document = await self._background.cancel(found.tenant, found.responses, found.name, found.document)
        return Response(response_of(document), media_type="application/json")

    async def _delete(self, request: Request) -> Response:
        found = await self._find(request)
        await self._background.delete(found.tenant, found.responses, found.name, found.document)
        if not await found.responses.delete(found.name):
            raise _not_found(request)
        return json_reply(200, {"id": found.name, "object": "response", "deleted": True})

    async def _input_items(self, request: Request) -> Response:
        document = (await self._find(request)).document
        _check_query(request, QUERY_PARAMETERS)
        return json_reply(200, page_of(input_of(document), request.query_params))


def _check_query(request: Request, known: frozenset[str]) -> None:
    for name, value in request.query_params.items():
        if name not in known and not (name == "stream" and value == "false"):
            shown = name[:MAX_ID_CHARACTERS]
            why = "needs stream=true" if name == "starting_after" else "this parameter is not supported; omit it"
            raise BadRequest(f"{shown}: {why}", param=shown)


def _not_found(request: Request) -> NotFound:
    return NotFound(f"response {_name(request)!r} does not exist")


def _name(request: Request) -> str:
    """Return the id in the path, shortened for use in an error message."""
    name: str = request.path_params["id"][:MAX_ID_CHARACTERS]
    return name
