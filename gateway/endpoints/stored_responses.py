"""GET and DELETE /v1/responses/{id}, and GET /v1/responses/{id}/input_items: reads and deletes stored responses.

Only the tenant whose key created a response can use it. For other tenants the response does not exist (404).
"""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gateway.auth.authenticator import Authenticator
from gateway.core.errors import BadRequest, NotFound
from gateway.endpoints.replies import json_reply
from gateway.endpoints.responses.item_pages import QUERY_PARAMETERS, page_of
from gateway.endpoints.responses.stored import MAX_ID_CHARACTERS, input_of, response_of
from gateway.policy.file import PolicyHolder
from gateway.response_store import ResponseStore, TenantResponses
from gateway.storage.base import Document

_STREAM = {"stream": "a stored response cannot be streamed again; omit it"}


class StoredResponsesApi:
    """Handlers of the routes that read and delete stored responses."""

    def __init__(self, authenticator: Authenticator, policies: PolicyHolder, response_store: ResponseStore) -> None:
        self._authenticator = authenticator
        self._policies = policies
        self._response_store = response_store

    def routes(self) -> list[Route]:
        return [
            Route("/v1/responses/{id}", self._show, methods=["GET"]),
            Route("/v1/responses/{id}", self._delete, methods=["DELETE"]),
            Route("/v1/responses/{id}/input_items", self._input_items, methods=["GET"]),
        ]

    async def _tenant_responses(self, request: Request) -> TenantResponses:
        policy = self._policies.current
        principal = await self._authenticator.authenticate(dict(request.scope["headers"]), policy)
        tenant_responses = self._response_store.of(principal.tenant, policy)
        if tenant_responses is None:
            raise NotFound(f"response {_name(request)!r} does not exist: the policy stores no responses")
        return tenant_responses

    async def _document(self, request: Request) -> Document:
        tenant_responses, name = await self._tenant_responses(request), request.path_params["id"]
        document = await tenant_responses.get(name) if len(name) <= MAX_ID_CHARACTERS else None
        if document is None:
            raise _not_found(request)
        return document

    async def _show(self, request: Request) -> Response:
        document = await self._document(request)
        _check_query(request, frozenset({"include_obfuscation"}))  # accepted and ignored, as it affects only streams
        return Response(response_of(document), media_type="application/json")

    async def _delete(self, request: Request) -> Response:
        tenant_responses, name = await self._tenant_responses(request), request.path_params["id"]
        if len(name) > MAX_ID_CHARACTERS or not await tenant_responses.delete(name):
            raise _not_found(request)
        return json_reply(200, {"id": name, "object": "response", "deleted": True})

    async def _input_items(self, request: Request) -> Response:
        document = await self._document(request)
        _check_query(request, QUERY_PARAMETERS)
        return json_reply(200, page_of(input_of(document), request.query_params))


def _check_query(request: Request, known: frozenset[str]) -> None:
    for name, value in request.query_params.items():
        if name not in known and not (name == "stream" and value == "false"):
            why = _STREAM.get(name, "this parameter is not supported; omit it")
            raise BadRequest(f"{name[:MAX_ID_CHARACTERS]}: {why}", param=name[:MAX_ID_CHARACTERS])


def _not_found(request: Request) -> NotFound:
    return NotFound(f"response {_name(request)!r} does not exist")


def _name(request: Request) -> str:
    """Return the id in the path, shortened for use in an error message."""
    name: str = request.path_params["id"][:MAX_ID_CHARACTERS]
    return name
