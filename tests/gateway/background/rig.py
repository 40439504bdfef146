"""A gateway that stores responses, and requests for responses in the background."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from gateway.background import BackgroundService
from gateway.endpoints.stored_responses import StoredResponsesApi
from tests.gateway.endpoints.stored_routes import STORED, send
from tests.gateway.harness import (
    DONE,
    Client,
    Rig,
    a_rig,
    delta,
    in_time,
    usage_frame,
)

STREAM = (delta("one "), delta("two"), usage_frame(), DONE)
ENDED = ("completed", "failed", "cancelled", "incomplete")


@asynccontextmanager
async def stored_rig(directory: Path, responses: dict[str, Any] | None = None, **changes: Any) -> AsyncIterator[Rig]:
    async with a_rig(directory, responses=responses or STORED, **changes) as rig:
        try:
            yield rig
        finally:
            await rig.background.close()


def asking(input: Any = "hello", **fields: Any) -> bytes:
    return json.dumps({"model": "m", "input": input, "background": True, **fields}).encode()


async def create(rig: Rig, **fields: Any) -> Any:
    client = await rig.ask(Client(asking(**fields), path="/v1/responses"))
    assert client.status == 200, client.content
    return client.json


async def call(rig: Rig, method: str, path: str, query: str = "", service: Any = None, **options: Any) -> Client:
    """A request to the routes of stored responses, here or at another gateway."""
    client = Client(method=method, path=f"/v1/responses/{path}", **options)
    await in_time(begin(rig, client, query, service))
    return client


def begin(rig: Rig, client: Client, query: str = "", service: BackgroundService | None = None) -> asyncio.Task[None]:
    api = StoredResponsesApi(
        rig.components.authenticator, rig.components.policies, rig.response_store, service or rig.background
    )
    return asyncio.create_task(send(api, client, query))


async def polled(rig: Rig, name: str, *statuses: str, service: BackgroundService | None = None) -> Any:
    """Poll until the response has one of the statuses."""
    for _ in range(1000):
        client = await call(rig, "GET", name, service=service)
        assert client.status == 200, client.content
        if client.json["status"] in (statuses or ENDED):
            return client.json
        await asyncio.sleep(0.01)
    raise AssertionError(f"the response is {client.json['status']}")


async def streamed(rig: Rig, name: str, after: int | None = None, service: Any = None) -> list[Any]:
    query = "stream=true" if after is None else f"stream=true&starting_after={after}"
    client = await call(rig, "GET", name, query, service)
    assert client.status == 200 and client.headers["content-type"].startswith("text/event-stream"), client.content
    parts = [part.partition("\n")[2] for part in client.content.decode().split("\n\n")[:-1]]
    return [json.loads(part.removeprefix("data: ")) for part in parts if part]


def text_of(response: Any) -> str:
    return "".join(part["text"] for item in response["output"] for part in item["content"])
