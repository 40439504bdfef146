"""What every source of deployments promises, tested with files, and with DNS and Kubernetes servers on real sockets."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import dns.rcode
import pytest

from gateway.deployments.instances import Instance
from gateway.discovery import SOURCES, InstanceSource, SourceError, make_source
from gateway.discovery import dns as dns_source
from gateway.discovery import file as file_source
from gateway.discovery import kubernetes as kubernetes_source
from gateway.policy import Source
from gateway.providers.transport import HTTPTransport
from gateway.settings import resolve_secret
from tests.gateway.discovery.scripted_dns import ScriptedDns
from tests.gateway.discovery.scripted_kubernetes import ScriptedKubernetes, a_pod, a_pool, a_slice, an_endpoint

WAIT_SECONDS = 20
KINDS = ("file.json", "file.yaml", "dns A", "dns SRV", "kubernetes pods", "kubernetes service", "inference pool")

Servers = Mapping[str, str]  # addresses by name


SELECTED = {
    "kubernetes pods": {"pods": "app=vllm"},
    "kubernetes service": {"service": "vllm"},
    "inference pool": {"inference_pool": "vllm"},
}


class World:
    """A source's other side: says which servers there are, and fails on demand."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.kind = kind
        self.path = folder / ("engines.json" if kind == "file.json" else "engines.yaml")
        self.dns, self.kubernetes = ScriptedDns(), ScriptedKubernetes()
        self.servers: Servers = {}

    @asynccontextmanager
    async def source(self) -> AsyncIterator[dict[str, Any]]:
        async with AsyncExitStack() as stack:
            if self.kind.startswith("file"):
                yield {"file": str(self.path)}
            elif self.kind.startswith("dns"):
                address = await stack.enter_async_context(self.dns.listening())
                record = self.kind.split()[1]
                port = {} if record == "SRV" else {"port": 8000}
                yield {"dns": {"name": "vllm.test", "type": record, "nameservers": [address], **port}}
            else:
                api = await stack.enter_async_context(self.kubernetes.listening())
                if self.kind.endswith("pool"):
                    self.kubernetes.pools = ScriptedKubernetes()
                    self.kubernetes.pools.put(a_pool("vllm", 8000, app="vllm"))
                selected = SELECTED[self.kind]
                yield {"kubernetes": {"api": api, "namespace": "llm", **selected}}

    def put(self, servers: Servers) -> None:
        before, self.servers = self.servers, servers
        groups = [{"targets": [f"{address}:8000"], "labels": {"name": name}} for name, address in servers.items()]
        if self.kind.startswith("file"):
            self.path.write_text(json.dumps(groups))
        self.dns.records = {"A": [*servers.values()], "SRV": [f"0 1 8000 {name}." for name in servers]}
        if self.kind.endswith(("pods", "pool")):
            for name in before.keys() - servers.keys():
                self.kubernetes.delete(name)
            for name, address in servers.items():
                if before.get(name) != address:
                    self.kubernetes.put(a_pod(name, address))
        elif self.kind.endswith("service"):
            self.kubernetes.put(a_slice("vllm-1", *(an_endpoint(name, at) for name, at in servers.items())))

    def fail(self) -> None:
        self.path.write_text("{ not a list")
        self.dns.code = dns.rcode.SERVFAIL
        self.kubernetes.failing = 500, "etcd is down"
        self.kubernetes.break_watches()

    def mend(self) -> None:
        self.dns.code = self.kubernetes.failing = None
        self.put(self.servers)

    def places(self) -> set[str]:
        """What the source should find: hosts, which are names in SRV records."""
        return set(self.servers if self.kind == "dns SRV" else self.servers.values())


class Followed:
    """Follows a source in a task, and keeps what it says."""

    def __init__(self, source: InstanceSource) -> None:
        self.source = source
        self.lists: asyncio.Queue[Sequence[Instance]] = asyncio.Queue()
        self.task = asyncio.create_task(source.follow(self.lists.put_nowait))

    async def until(self, hosts: set[str]) -> list[Instance]:
        """The first list with just these hosts."""
        async with asyncio.timeout(WAIT_SECONDS):
            while True:
                getting = asyncio.create_task(self.lists.get())
                await asyncio.wait([getting, self.task], return_when=asyncio.FIRST_COMPLETED)
                if not getting.done():
                    getting.cancel()
                    await self.task
                if {each.host for each in getting.result()} == hosts:
                    return list(getting.result())

    async def error(self) -> str:
        async with asyncio.timeout(WAIT_SECONDS):
            with pytest.raises(SourceError) as raised:
                await self.task
        return str(raised.value)


@pytest.fixture(params=KINDS)
async def world(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.setattr(file_source, "LOOK_SECONDS", 0.02)
    monkeypatch.setattr(dns_source, "PAUSE_MIN_SECONDS", 0.02)
    monkeypatch.setattr(kubernetes_source, "WATCH_PAUSE_SECONDS", 0.02)
    monkeypatch.setattr("tests.gateway.discovery.scripted_dns.TTL", 0)
    return World(request.param, tmp_path)


@asynccontextmanager
async def following(world: World) -> AsyncIterator[Followed]:
    async with world.source() as config:
        transport = HTTPTransport()
        followed = Followed(make_source(Source.model_validate(config), transport, resolve_secret))
        try:
            yield followed
        finally:
            followed.task.cancel()
            await asyncio.wait([followed.task])
            await transport.aclose()


def test_every_kind_of_source_is_tested() -> None:
    assert {
        "kubernetes" if kind in SELECTED else kind.partition(" ")[0].partition(".")[0] for kind in KINDS
    } == SOURCES.keys()


async def test_servers_come_and_go(world: World) -> None:
    world.put({"one": "10.0.0.1", "two": "10.0.0.2", "three": "10.0.0.3"})
    async with following(world) as followed:
        first = await followed.until(world.places())
        assert [each.port for each in first] == [8000] * 3
        assert len({each.name for each in first}) == len({each.identity for each in first}) == 3
        world.put({"two": "10.0.0.2", "four": "10.0.0.4"})
        second = {each.host: each.identity for each in await followed.until(world.places())}
        known = {each.host: each.identity for each in first}
        assert {host: second[host] for host in second if host in known} == {
            host: known[host] for host in second if host in known
        }, "a server keeps its identity"


async def test_an_empty_list_is_a_list(world: World) -> None:
    world.put({"one": "10.0.0.1"})
    async with following(world) as followed:
        await followed.until(world.places())
        world.put({})
        await followed.until(set())


async def test_a_failure_is_an_error_and_no_list_and_ends_when_the_source_works_again(world: World) -> None:
    world.put({"one": "10.0.0.1"})
    async with following(world) as followed:
        await followed.until(world.places())
        world.fail()
        assert await followed.error()
        while not followed.lists.empty():
            assert followed.lists.get_nowait(), "no empty list because of a failure"
        world.mend()
        followed.task = asyncio.create_task(followed.source.follow(followed.lists.put_nowait))
        await followed.until(world.places())
        world.put({"one": "10.0.0.1", "two": "10.0.0.2"})
        await followed.until(world.places())


async def test_a_server_with_a_name_keeps_its_identity_when_its_address_changes(world: World) -> None:
    world.put({"one": "10.0.0.1"})
    async with following(world) as followed:
        (before,) = await followed.until(world.places())
        world.put({"one": "10.0.0.9"})
        (after,) = await followed.until(world.places())
        has_names = world.kind != "dns A"
        assert ((after.name, after.identity) == (before.name, before.identity)) == has_names
