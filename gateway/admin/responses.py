"""`DELETE /admin/responses/{tenant}`: deletes all that the storage has of a tenant's requests and answers.

These are its responses, conversations, chat completions, events, and answers of its idempotency keys. It also works
for a tenant that is not in the policy any more, and if the policy no longer stores responses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gateway.admin.authorization import check_tenant
from gateway.auth.tenants import TenantRegistry
from gateway.endpoints.replies import json_reply
from gateway.storage.base import DELETE_BATCH_SIZE, DocumentStore


def response_routes(
    documents: DocumentStore, spaces_of: Callable[[str], Sequence[str]], tenants: TenantRegistry
) -> list[Route]:
    """The route, to be mounted behind the admin key. `spaces_of` names what the storage has of a tenant."""

    async def delete(request: Request) -> Response:
        tenant = request.path_params["tenant"]
        check_tenant(request, tenants, tenant)
        deleted = 0
        for space in spaces_of(tenant):
            some = DELETE_BATCH_SIZE
            while some == DELETE_BATCH_SIZE:
                some = await documents.delete_some_documents(space)
                deleted += some
        return json_reply(200, {"tenant": tenant, "deleted": deleted})

    return [Route("/admin/responses/{tenant:path}", delete, methods=["DELETE"])]
