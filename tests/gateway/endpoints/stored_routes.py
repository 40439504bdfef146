"""Requests to the routes of stored objects, by one of two tenants."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from starlette.applications import Starlette

from gateway.core.api_keys import hash_key
from gateway.endpoints.replies import EXCEPTION_HANDLERS
from gateway.endpoints.stored_objects import StoredObjectsApi
from tests.gateway.harness import PEPPER, Client, Rig

STORED = {"keep": "30d"}
OTHER_KEY = "wp-other-0123456789abcdef"
OTHER = {"name": "other", "keys": [{"id": "other", "hash": hash_key(OTHER_KEY, PEPPER)}]}


def native(api: str) -> dict[str, Any]:
    """The parts of a policy whose only deployment has this API itself."""
    deployment = {"name": "a", "base_url": "http://a.invalid/v1", "model": "served", "native": [api]}
    return {"deployments": [deployment], "models": [{"name": "m", "deployments": ["a"]}]}


async def call_route(
    rig: Rig, kind: Any, method: str, path: str, query: str = "", body: Any = None, **options: Any
) -> Client:
    """Call a route of this kind of `StoredObjectsApi`. `body` is an object, or parts as in `Client`."""
    api = kind(rig.components.authenticator, rig.components.policies, rig.response_store)
    content = body if isinstance(body, Sequence) else b"" if body is None else json.dumps(body).encode()
    client = Client(content, method=method, path=path, **options)
    await send(api, client, query)
    return client


async def send(api: StoredObjectsApi, client: Client, query: str = "") -> None:
    """Send a client's request to the routes of an API."""
    app = Starlette(routes=api.routes(), exception_handlers=EXCEPTION_HANDLERS)
    client.scope["query_string"] = query.encode()
    await app(client.scope, client.receive, client.send)
