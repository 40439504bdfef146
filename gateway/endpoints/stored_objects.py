"""What the routes of stored objects have in common: they find the tenant's objects, and read the bodies of requests."""

from __future__ import annotations

from abc import ABC, abstractmethod

import msgspec
from starlette.requests import Request
from starlette.routing import Route

from gateway.auth.authenticator import Authenticator
from gateway.core.errors import BadRequest, NotFound
from gateway.endpoints.request_body import RequestBody
from gateway.endpoints.wire import ClientGone
from gateway.policy import Policy, Tenant
from gateway.policy.file import PolicyHolder
from gateway.prompts.reader import Metadata, check_utf8
from gateway.response_store import ResponseStore, TenantResponses


class NewMetadata(msgspec.Struct):
    """A body that replaces an object's metadata."""

    metadata: Metadata


class StoredObjectsApi(ABC):
    """Base of the handlers of one kind of stored objects."""

    def __init__(self, authenticator: Authenticator, policies: PolicyHolder, response_store: ResponseStore) -> None:
        self._authenticator = authenticator
        self._policies = policies
        self._response_store = response_store

    @abstractmethod
    def routes(self) -> list[Route]:
        """Return the routes, for the application."""

    async def _stored(self, request: Request, missing: str) -> tuple[Policy, Tenant, TenantResponses]:
        """Return the policy, the client's tenant and its stored responses.

        Raises `NotFound` with the message `missing` and the reason if the policy stores no responses.
        """
        policy = self._policies.current
        principal = await self._authenticator.authenticate(dict(request.scope["headers"]), policy)
        responses = self._response_store.of(principal.tenant, policy)
        if responses is None:
            raise NotFound(f"{missing}: the policy stores no responses")
        return policy, principal.tenant, responses

    async def _body(self, request: Request, objects: TenantResponses) -> bytes:
        """Return the body, which may be as long as a stored object, and is UTF-8. Its bytes count as held until all
        have arrived.

        Raises `BodyTooLarge`, `Overloaded`, `RequestTimeout` or `BadRequest`.
        """
        headers, room = dict(request.scope["headers"]), self._response_store.room
        body = RequestBody(headers, request.receive, None, max_bytes=objects.max_bytes, budget=room)
        try:
            content = await body.read()
        except ClientGone:
            raise BadRequest("the client disconnected before the end of the body") from None
        finally:
            body.release()
        check_utf8(content)
        return content
