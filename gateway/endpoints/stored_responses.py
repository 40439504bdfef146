"""GET and DELETE of /v1/responses/{id}, and its input items: what the door of responses has kept.

A response belongs to the tenant of the key that made it. Another tenant's does not exist.
"""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gateway.auth.authenticator import Authenticator
from gateway.core.errors import BadRequest, NotFound
from gateway.endpoints.replies import json_reply
from gateway.endpoints.responses.listing import KNOWN, page_of
from gateway.endpoints.responses.stored import MAX_ID_CHARACTERS, input_of, response_of
from gateway.policy.file import PolicyHolder
from gateway.response_store import Archive, Archives
from gateway.storage.base import Document

_STREAM = {"stream": "a kept response is not streamed again; leave it out"}


class KeptResponses:
    def __init__(self, authenticator: Authenticator, policies: PolicyHolder, archives: Archives) -> None:
        self._authenticator = authenticator
        self._policies = policies
        self._archives = archives

    def routes(self) -> list[Route]:
        return [
            Route("/v1/responses/{id}", self._show, methods=["GET"]),
            Route("/v1/responses/{id}", self._delete, methods=["DELETE"]),
            Route("/v1/responses/{id}/input_items", self._input_items, methods=["GET"]),
        ]

    async def _archive(self, request: Request) -> Archive:
        policy = self._policies.current
        principal = await self._authenticator.authenticate(dict(request.scope["headers"]), policy)
        archive = self._archives.of(principal.tenant, policy)
        if archive is None:
            raise NotFound(f"there is no response {_name(request)!r}: none are kept here")
        return archive

    async def _document(self, request: Request) -> Document:
        archive, name = await self._archive(request), request.path_params["id"]
        document = await archive.get(name) if len(name) <= MAX_ID_CHARACTERS else None
        if document is None:
            raise _no(request)
        return document

    async def _show(self, request: Request) -> Response:
        document = await self._document(request)
        _check_query(request, frozenset({"include_obfuscation"}))  # of a stream, which this is none of
        return Response(response_of(document), media_type="application/json")

    async def _delete(self, request: Request) -> Response:
        archive, name = await self._archive(request), request.path_params["id"]
        if len(name) > MAX_ID_CHARACTERS or not await archive.delete(name):
            raise _no(request)
        return json_reply(200, {"id": name, "object": "response", "deleted": True})

    async def _input_items(self, request: Request) -> Response:
        document = await self._document(request)
        _check_query(request, KNOWN)
        return json_reply(200, page_of(input_of(document), request.query_params))


def _check_query(request: Request, known: frozenset[str]) -> None:
    for name, value in request.query_params.items():
        if name not in known and not (name == "stream" and value == "false"):
            why = _STREAM.get(name, "this parameter is not supported here; leave it out")
            raise BadRequest(f"{name[:MAX_ID_CHARACTERS]}: {why}", param=name[:MAX_ID_CHARACTERS])


def _no(request: Request) -> NotFound:
    return NotFound(f"there is no response {_name(request)!r}")


def _name(request: Request) -> str:
    name: str = request.path_params["id"][:MAX_ID_CHARACTERS]
    return name
