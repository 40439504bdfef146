"""A running application, with requests to it without sockets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import yaml

from gateway.policy.file import PolicyHolder
from gateway.server.app import Gateway
from gateway.server.policy_checks import IN_SERVICE
from gateway.settings import Settings
from tests.gateway.harness import (
    PEPPER,
    Client,
    in_time,
    policy_of,
    settle,
    tenant,
)


def policy_for(base_url: str, **changes: Any) -> dict[str, Any]:
    deployments = [{"name": "a", "base_url": base_url, "model": "served", "max_concurrency": 2}]
    models = [{"name": "m", "aliases": ["Qwen/m"], "deployments": ["a"]}, {"name": "private", "deployments": ["a"]}]
    return policy_of(deployments=deployments, models=models, tenants=[{**tenant(), "models": ["m"]}], **changes)


class Application:
    """A gateway by its settings, and its lifespan as a server drives it."""

    def __init__(self, directory: Path, policy: dict[str, Any], **settings: Any) -> None:
        self.policy_file = directory / "policy.yaml"
        self.write_policy(policy)
        known = {"policy": self.policy_file, "data_dir": directory, "replica": "r", "key_pepper": PEPPER, **settings}
        self.policies = PolicyHolder(self.policy_file, checks=IN_SERVICE)
        self.gateway = Gateway(Settings(**known), self.policies)
        self.ledger = directory / "ledger" / "r"
        self.said: asyncio.Queue[Any] = asyncio.Queue()
        self._heard: asyncio.Queue[Any] = asyncio.Queue()
        self._life: asyncio.Task[None]

    def write_policy(self, policy: dict[str, Any]) -> None:
        self.policy_file.write_text(yaml.safe_dump(policy))

    async def start(self) -> Any:
        self._life = asyncio.create_task(self.gateway({"type": "lifespan"}, self._heard.get, self.said.put))
        self._heard.put_nowait({"type": "lifespan.startup"})
        return await in_time(self.said.get())

    async def stop(self) -> Any:
        self._heard.put_nowait({"type": "lifespan.shutdown"})
        message = await in_time(self.said.get())
        await in_time(self._life)
        return message

    def begin(self, client: Client) -> asyncio.Task[None]:
        return asyncio.create_task(self.gateway(client.scope, client.receive, client.send))

    async def ask(self, *args: Any, **more: Any) -> Client:
        client = Client(*args, **more)
        await in_time(self.begin(client))
        return client

    async def get(self, path: str, **more: Any) -> Client:
        return await self.ask(method="GET", path=path, **more)


@asynccontextmanager
async def running(directory: Path, policy: dict[str, Any], **settings: Any) -> AsyncIterator[Application]:
    app = Application(directory, policy, **settings)
    assert (await app.start())["type"] == "lifespan.startup.complete"
    try:
        yield app
    finally:
        assert (await app.stop())["type"] == "lifespan.shutdown.complete"
        await settle()
        assert asyncio.all_tasks() == {asyncio.current_task()}, "a task is left behind"
