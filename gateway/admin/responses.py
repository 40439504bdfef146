"""`DELETE /admin/responses/{tenant}`: deletes all stored responses of a tenant.

It also works for a tenant that is not in the policy any more, and if the policy no longer stores responses.
"""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gateway.endpoints.replies import json_reply
from gateway.storage.base import DELETE_BATCH_SIZE, DocumentStore


def response_routes(documents: DocumentStore) -> list[Route]:
    """The route, to be mounted behind the admin key."""

    async def delete(request: Request) -> Response:
        tenant = request.path_params["tenant"]
        deleted = some = await documents.delete_some_documents(tenant)
        while some == DELETE_BATCH_SIZE:
            some = await documents.delete_some_documents(tenant)
            deleted += some
        return json_reply(200, {"tenant": tenant, "deleted": deleted})

    return [Route("/admin/responses/{tenant:path}", delete, methods=["DELETE"])]
