"""The watch protocol: resuming, bookmarks, expired versions, pages; and what pods and EndpointSlices say."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from gateway.deployments.instances import Instance
from gateway.discovery import SourceError, kubernetes_api, make_source
from gateway.discovery import kubernetes as kubernetes_source
from gateway.discovery.kubernetes import KubernetesSource
from gateway.policy import Source
from gateway.providers.transport import HTTPTransport
from gateway.settings import resolve_secret
from tests.gateway.discovery.scripted_kubernetes import ScriptedKubernetes, a_pod, a_pool, a_slice, an_endpoint

WAIT_SECONDS = 20


class Cluster:
    """A scripted API server, a source that reads it, and the last list that it gave."""

    def __init__(self, server: ScriptedKubernetes, source: KubernetesSource) -> None:
        self.server, self.source = server, source
        self.found: list[Instance] = []
        self.updates = 0

    def take(self, found: Any) -> None:
        self.found, self.updates = list(found), self.updates + 1

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(WAIT_SECONDS):
            while not condition():
                await asyncio.sleep(0.005)

    @property
    def addresses(self) -> set[str]:
        return {each.address for each in self.found}


@asynccontextmanager
async def a_cluster(monkeypatch: pytest.MonkeyPatch, **config: Any) -> AsyncIterator[Cluster]:
    monkeypatch.setattr(kubernetes_source, "WATCH_PAUSE_SECONDS", 0.01)
    server, transport = ScriptedKubernetes(), HTTPTransport()
    async with server.listening() as api:
        source = Source.model_validate({"kubernetes": {"api": api, "namespace": "llm", "pods": "app=vllm", **config}})
        made = make_source(source, transport, resolve_secret)
        assert isinstance(made, KubernetesSource)
        yield Cluster(server, made)
        await transport.aclose()


@asynccontextmanager
async def followed(cluster: Cluster) -> AsyncIterator[asyncio.Task[None]]:
    task = asyncio.create_task(cluster.source.follow(cluster.take))
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.wait([task])


async def test_a_watch_that_the_server_ends_goes_on_from_its_version(monkeypatch: pytest.MonkeyPatch) -> None:
    async with a_cluster(monkeypatch) as cluster:
        server = cluster.server
        for number in range(5):  # three pages
            server.put(a_pod(f"pod-{number}", f"10.0.0.{number}"))
        async with followed(cluster):
            await cluster.until(lambda: len(server.watchers) == 1 and len(cluster.found) == 5)
            server.bookmark()
            server.put(a_pod("pod-5", "10.0.0.5"))
            await cluster.until(lambda: len(cluster.found) == 6)
            seen = server.version
            task = [each for each in asyncio.all_tasks() if each.get_coro().__name__ == "follow"]  # type: ignore[union-attr]
            server.break_watches()
            await asyncio.wait(task, timeout=WAIT_SECONDS)  # a connection that breaks is a failure
        server.delete("pod-0")  # while there is no watch
        async with followed(cluster):
            await cluster.until(lambda: "10.0.0.0:8000" not in cluster.addresses)
        watches = [query for query in server.requests if query.get("watch")]
        assert [query["resourceVersion"] for query in watches[-1:]] == [str(seen)]
        assert cluster.source.watch.lists == 1 and len(cluster.found) == 5
        assert [query.get("limit") for query in server.requests if "watch" not in query] == ["250"] * 3
        assert all(query["allowWatchBookmarks"] == "true" and query["timeoutSeconds"] for query in watches)


async def test_a_bookmark_moves_the_version(monkeypatch: pytest.MonkeyPatch) -> None:
    async with a_cluster(monkeypatch) as cluster:
        cluster.server.put(a_pod("pod-0"))
        async with followed(cluster):
            await cluster.until(lambda: len(cluster.server.watchers) == 1)
            cluster.server.bookmark()
            cluster.server.bookmark()
            await cluster.until(lambda: cluster.source.watch._version == str(cluster.server.version))
            assert cluster.source.watch.lists == 1


@pytest.mark.parametrize("in_watch", [True, False], ids=["as an event", "as a status"])
async def test_an_expired_version_is_listed_again(monkeypatch: pytest.MonkeyPatch, in_watch: bool) -> None:
    async with a_cluster(monkeypatch) as cluster:
        server = cluster.server
        server.put(a_pod("pod-0", "10.0.0.1"))
        async with followed(cluster) as task:
            await cluster.until(lambda: len(server.watchers) == 1)
            server.objects["pod-1"] = a_pod("pod-1", "10.0.0.2")  # of which no event tells
            server.expire(in_watch=in_watch)
            if not in_watch:  # the broken connection is a failure; the next watch gets the 410
                with pytest.raises(SourceError, match="cannot be read"):
                    await asyncio.wait_for(task, WAIT_SECONDS)
                task = asyncio.create_task(cluster.source.follow(cluster.take))
            await cluster.until(lambda: cluster.addresses == {"10.0.0.1:8000", "10.0.0.2:8000"})
            assert cluster.source.watch.lists == 2
            task.cancel()


async def test_a_list_that_always_expires_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    async with a_cluster(monkeypatch) as cluster:
        cluster.server.failing = 410, "gone"
        with pytest.raises(SourceError, match="410 Gone"):
            await asyncio.wait_for(cluster.source.follow(cluster.take), WAIT_SECONDS)
        assert not cluster.updates


async def test_failures_say_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    async with a_cluster(monkeypatch) as cluster:
        cluster.server.failing = 403, 'pods is forbidden: User "x" cannot list'
        with pytest.raises(SourceError, match=r"403: pods is forbidden.*list and watch"):
            await cluster.source.follow(cluster.take)
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(SourceError, match="set api"):
        make_source(Source.model_validate({"kubernetes": {"pods": "a=b"}}), HTTPTransport(), resolve_secret)


async def test_too_long_lists_and_lines_are_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kubernetes_api, "OBJECTS_MAX", 3)
    monkeypatch.setattr(kubernetes_api, "EVENT_MAX_BYTES", 1000)
    async with a_cluster(monkeypatch) as cluster:
        async with followed(cluster) as task:
            await cluster.until(lambda: len(cluster.server.watchers) == 1)
            cluster.server.put(a_pod("pod-0", annotations={"long": "x" * 100_000}))
            with pytest.raises(SourceError, match="longer than 1000 bytes"):
                await asyncio.wait_for(task, WAIT_SECONDS)
        for number in range(4):
            cluster.server.put(a_pod(f"pod-{number}"))
        cluster.source.watch.restart()
        with pytest.raises(SourceError, match="more than 3 objects"):
            await cluster.source.follow(cluster.take)


async def test_a_token_is_read_again_for_each_request(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("old-token")
    async with a_cluster(monkeypatch, token={"file": str(token)}) as cluster, followed(cluster):
        await cluster.until(lambda: len(cluster.server.watchers) == 1)
        token.write_text("new-token")
        cluster.server.expire(in_watch=True)
        await cluster.until(lambda: "new-token" in cluster.server.tokens)
        assert cluster.server.tokens[0] == "old-token"


async def test_only_pods_that_are_ready_and_not_being_deleted_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    async with a_cluster(monkeypatch, port="http") as cluster:
        server = cluster.server
        server.put(a_pod("ready", "10.0.0.1", labels={"model": "llama"}, annotations={"note": "n"}))
        server.put(a_pod("starting", "10.0.0.2", ready=False))
        async with followed(cluster):
            await cluster.until(lambda: cluster.addresses == {"10.0.0.1:8000"})
            (only,) = cluster.found
            assert (only.name, only.identity, only.labels) == (
                "ready", "uid-ready", {"model": "llama", "note": "n"},
            )  # fmt: skip
            server.put(a_pod("starting", "10.0.0.2"))
            await cluster.until(lambda: len(cluster.found) == 2)
            server.put(a_pod("ready", "10.0.0.1", deletionTimestamp="2026-11-01T00:00:00Z"))
            await cluster.until(lambda: cluster.addresses == {"10.0.0.2:8000"})


async def test_endpoints_of_all_slices_count_once_each(monkeypatch: pytest.MonkeyPatch) -> None:
    async with a_cluster(monkeypatch, pods=None, service="vllm", port=None) as cluster:
        server = cluster.server
        server.put(a_slice("v6", an_endpoint("a", "fd00::1"), an_endpoint("c", "fd00::3"), kind="IPv6"))
        server.put(a_slice("v4", an_endpoint("a", "10.0.0.1"), an_endpoint("b", "10.0.0.2", ready=False)))
        server.put(a_slice("more", an_endpoint("d", "10.0.0.4", ready=None)))
        async with followed(cluster):
            await cluster.until(lambda: len(cluster.found) == 3)
            assert cluster.addresses == {"10.0.0.1:8000", "[fd00::3]:8000", "10.0.0.4:8000"}
            assert cluster.found[0].labels["topology.kubernetes.io/zone"] == "zone-a"
            assert cluster.server.paths[0] == "/apis/discovery.k8s.io/v1/namespaces/llm/endpointslices"
            leaving = an_endpoint("d", "10.0.0.4", ready=False, terminating=True)
            server.put(a_slice("more", leaving))
            await cluster.until(lambda: len(cluster.found) == 2)


async def test_a_port_that_is_not_clear_is_an_error_with_the_ports(monkeypatch: pytest.MonkeyPatch) -> None:
    async with a_cluster(monkeypatch, port="grpc") as cluster:
        cluster.server.put(a_pod("pod-0"))
        with pytest.raises(SourceError, match=r"pod pod-0 has no TCP port named 'grpc'; its ports: http \(8000\)"):
            await cluster.source.follow(cluster.take)


async def test_the_pods_of_an_inference_pool_are_followed_and_so_is_the_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    async with a_cluster(monkeypatch, pods=None, inference_pool="llama") as cluster:
        server, pools = cluster.server, ScriptedKubernetes()
        server.pools = pools
        with pytest.raises(SourceError, match="there is no InferencePool llama in llm"):
            await cluster.source.follow(cluster.take)
        pools.put(a_pool("llama", 8000, app="vllm", model="llama"))
        server.put(a_pod("pod-0", "10.0.0.1"))
        async with followed(cluster):
            await cluster.until(lambda: cluster.addresses == {"10.0.0.1:8000"})
            assert (cluster.found[0].name, cluster.found[0].identity) == ("pod-0", "uid-pod-0")
            await cluster.until(lambda: len(server.watchers) == len(pools.watchers) == 1)
            server.put(a_pod("pod-1", "10.0.0.2"))
            await cluster.until(lambda: len(cluster.found) == 2)
            pools.put(a_pool("llama", 8100, 8101, app="vllm", model="llama"))  # the same pods, other ports
            await cluster.until(lambda: len(cluster.found) == 4)
            assert [(each.name, each.identity, each.address) for each in cluster.found[:2]] == [
                ("pod-0:8100", "uid-pod-0:8100", "10.0.0.1:8100"),
                ("pod-0:8101", "uid-pod-0:8101", "10.0.0.1:8101"),
            ]
            lists = [query["labelSelector"] for query in server.requests if "watch" not in query]
            assert lists == ["app=vllm,model=llama"], "they are not listed again"
            pools.put(a_pool("llama", 8000, app="sglang"))
            await cluster.until(lambda: cluster.addresses == {"10.0.0.1:8000", "10.0.0.2:8000"})
            assert [query["labelSelector"] for query in server.requests if "watch" not in query][1:] == ["app=sglang"]
        assert pools.paths[0] == "/apis/inference.networking.k8s.io/v1/namespaces/llm/inferencepools"
        assert {query["fieldSelector"] for query in pools.requests} == {"metadata.name=llama"}


async def test_the_failures_of_an_inference_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    async with a_cluster(monkeypatch, pods=None, inference_pool="llama") as cluster:
        server, pools = cluster.server, ScriptedKubernetes()
        server.pools = pools
        pools.put(a_pool("llama", 8000))
        with pytest.raises(SourceError, match="would select every pod"):
            await cluster.source.follow(cluster.take)
        pools.put(a_pool("llama", 8000, app="vllm"))
        server.failing = 403, "pods is forbidden"
        with pytest.raises(SourceError, match="403: pods is forbidden"):
            await cluster.source.follow(cluster.take)
        server.failing = None
        server.put(a_pod("pod-0", "10.0.0.1"))
        async with followed(cluster) as task:
            await cluster.until(lambda: len(cluster.found) == 1)
            pools.delete("llama")
            with pytest.raises(SourceError, match="there is no InferencePool llama"):
                await asyncio.wait_for(task, WAIT_SECONDS)
        assert len(cluster.found) == 1, "the last list stays"
