"""A follower keeps the last good list, asks for models, bounds the servers, and says what it knows."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from gateway.core.supervision import Supervisor
from gateway.deployments.fleet import Fleet
from gateway.discovery import discovery as discovery_module
from gateway.discovery import file as file_source
from gateway.discovery import follower as follower_module
from gateway.discovery.discovery import Discovery
from gateway.policy import Deployment, Policy
from gateway.providers import make_provider
from gateway.providers.transport import HTTPTransport
from gateway.settings import resolve_secret
from tests.gateway.calls import a_policy

WAIT_SECONDS = 20


def a_template(path: Path, **fields: Any) -> Policy:
    source = {"file": str(path), **fields.pop("source", {})}
    return a_policy(
        deployments=[{"name": "engines", "source": source, **fields}],
        models=[{"name": "m", "aliases": ["alias"], "deployments": ["engines"]}],
    )


@asynccontextmanager
async def discovering(policy: Policy) -> AsyncIterator[tuple[Fleet, Discovery]]:
    transport, supervisor = HTTPTransport(), Supervisor()

    def make(deployment: Deployment) -> Any:
        return make_provider(deployment, transport, resolve_secret)

    fleet = Fleet(make)
    discovery = Discovery(fleet, transport, resolve_secret, make, supervisor)
    fleet.apply(policy)
    discovery.apply(policy)
    task = asyncio.create_task(discovery.run())
    try:
        yield fleet, discovery
    finally:
        task.cancel()
        await asyncio.wait([task])
        await transport.aclose()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_SECONDS):
        while not condition():
            await asyncio.sleep(0.005)


def write(path: Path, *targets: str, **labels: str) -> None:
    path.write_text(json.dumps([{"targets": [target], "labels": labels} for target in targets]))


def names(fleet: Fleet) -> list[str]:
    return [deployment.name for deployment in fleet]


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(file_source, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(follower_module, "RETRY_MIN_SECONDS", 0.01)
    monkeypatch.setattr(follower_module, "RETRY_SECONDS", 0.01)
    return tmp_path / "engines.json"


async def test_the_last_list_stays_in_use_while_the_source_fails(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "warmpath")
    async with discovering(a_template(path, model="served")) as (fleet, discovery):
        await until(lambda: any(follower.error for follower in discovery))
        assert discovery.unread() == ["engines"]
        assert discovery.state()["engines"]["status"] == "starting"
        write(path, "10.0.0.1:8000", "10.0.0.2:8000")
        await until(lambda: len(names(fleet)) == 2)
        assert discovery.unread() == [] and discovery.state()["engines"]["status"] == "ok"
        path.rename(path.with_suffix(".away"))  # noqa: ASYNC240 (a test's own file)
        await until(lambda: discovery.state()["engines"]["status"] == "stale")
        assert names(fleet) == ["engines/10.0.0.1:8000", "engines/10.0.0.2:8000"]
        assert "cannot be read" in str(discovery.state()["engines"]["error"])
        write(path, "10.0.0.2:8000")
        await until(lambda: names(fleet) == ["engines/10.0.0.2:8000"])
        (follower,) = discovery
        assert (follower.instances, follower.error, follower.failures > 0) == (1, None, True)
    lines = [record.getMessage() for record in caplog.records]
    (kept,) = [line for line in lines if "stay in use" in line]  # logged once, however often it was tried
    assert f"discovery of engines, file {path}: cannot be read" in kept and "the last 2 servers" in kept
    assert any("it works again" in line for line in lines)


async def test_further_servers_than_the_bound_are_ignored(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(path, *(f"10.0.0.{number}:8000" for number in range(1, 6)))
    async with discovering(a_template(path, model="served", source={"max_instances": 2})) as (fleet, discovery):
        await until(lambda: len(names(fleet)) == 2)
        assert names(fleet) == ["engines/10.0.0.1:8000", "engines/10.0.0.2:8000"]
        assert discovery.state()["engines"]["ignored"] == 3
    assert "3 servers ignored, because max_instances is 2" in caplog.text


async def test_a_server_is_asked_for_its_model(path: Path) -> None:
    listed: list[str] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        body = json.dumps({"object": "list", "data": [{"id": name} for name in listed]}).encode()
        writer.write(b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        write(path, f"127.0.0.1:{port}")
        async with discovering(a_template(path)) as (fleet, discovery):
            await until(lambda: "model_unknown" in discovery.state().get("engines", ()))
            assert names(fleet) == [], "not before its model is known"
            listed.append("llama")
            await until(lambda: len(names(fleet)) == 1)
            (deployment,) = fleet
            assert (deployment.config.model, deployment.config.base_url) == ("llama", f"http://127.0.0.1:{port}/v1")
            assert "model_unknown" not in discovery.state()["engines"]
            write(path, f"127.0.0.1:{port}", model="from-the-label")
            await until(lambda: [each.config.model for each in fleet] == ["from-the-label"])


async def test_a_reload_changes_the_servers_settings_and_starts_and_stops_followers(path: Path) -> None:
    write(path, "10.0.0.1:8000")
    async with discovering(a_template(path, model="served")) as (fleet, discovery):
        await until(lambda: len(names(fleet)) == 1)
        (deployment,) = fleet
        changed = a_template(path, model="served", max_concurrency=3)
        fleet.apply(changed)
        discovery.apply(changed)
        assert [each.slots for each in fleet] == [3] and [*fleet] == [deployment], "without waiting for the source"
        await until(lambda: next(iter(discovery)).has_list)
        without = a_policy()
        fleet.apply(without)
        discovery.apply(without)
        await until(lambda: not list(discovery))
        assert names(fleet) == ["a", "b"]


async def test_the_gateway_does_not_wait_for_ever_for_a_source(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with discovering(a_template(path, model="served")) as (_, discovery):
        await until(lambda: discovery.unread() == ["engines"])
        monkeypatch.setattr(discovery_module, "FIRST_LIST_SECONDS", -1.0)
        assert discovery.unread() == []
