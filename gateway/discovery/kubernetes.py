"""Source: the EndpointSlices of a Service, pods with given labels, or an InferencePool, in a Kubernetes cluster.

    list  -->  watch from the list's version  -->  each event, each bookmark moves the version
                 |  the server ends the watch, or the connection breaks: watch again from the version
                 |  410 Gone, the version has expired: list again

Only the list and the events of the watch change what is known, so a failure of the API server changes nothing. An
InferencePool names labels and ports: it is watched, and the pods with these labels beside it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Generic, TypeVar, cast

import msgspec

from gateway.deployments.instances import Instance
from gateway.discovery.base import InstanceSource, SourceError, Update
from gateway.discovery.kubernetes_api import (
    SERVICE_ACCOUNT,
    WATCH_GRACE_SECONDS,
    WATCH_SECONDS,
    ExpiredVersion,
    KubernetesApi,
    WatchEvent,
)
from gateway.discovery.kubernetes_objects import (
    AnyObject,
    EndpointSlice,
    InferencePool,
    Pod,
    instances_of_pods,
    instances_of_pool,
    instances_of_slices,
)
from gateway.policy import KubernetesSource as Config
from gateway.policy import Secret
from gateway.providers.transport import HTTPTransport

WATCH_PAUSE_SECONDS = 1.0  # between the starts of two watches, if the server ends them at once
POOL_GROUP = "inference.networking.k8s.io"
LISTS_MAX = 3  # in a row that expire before they are complete or watched


Decoded = TypeVar("Decoded")
Watched = TypeVar("Watched", bound=AnyObject)
_bookmark = msgspec.json.Decoder(AnyObject)


class ObjectWatch(Generic[Watched]):
    """Watches the objects of a collection. They and their version are kept when `follow` fails, for the next call.

    `selector`: the query parameter that selects them, labelSelector or fieldSelector.
    """

    def __init__(self, api: KubernetesApi, path: str, selector: Mapping[str, str], kind: type[Watched]) -> None:
        self.selector = selector
        self.lists = 0  # since the start
        self._api = api
        self._path = path
        self._decoder = msgspec.json.Decoder(kind)
        self._objects: dict[str, Watched] = {}  # by name
        self._version: str | None = None  # from which to watch; None if the objects must be listed

    async def follow(self, update: Callable[[Sequence[Watched]], None]) -> None:
        """Call `update` with all objects when they were read, and after each change. Raises `SourceError`."""
        loop, expired = asyncio.get_running_loop(), 0
        while True:
            began = loop.time()
            try:
                if self._version is None:
                    await self._list()
                    update([*self._objects.values()])
                await self._watch(update)
                expired = 0
            except ExpiredVersion:
                self._version = None
                expired += 1
                if expired >= LISTS_MAX:
                    raise SourceError(f"its lists have expired {expired} times in a row (410 Gone)") from None
                continue
            await asyncio.sleep(max(0.0, began + WATCH_PAUSE_SECONDS - loop.time()))

    def restart(self) -> None:
        """List the objects again when `follow` is called."""
        self._version = None

    async def _list(self) -> None:
        raw, version = await self._api.list_objects(self._path, self.selector)
        objects = [self._decode(each, self._decoder) for each in raw]
        self._objects = {each.metadata.name: each for each in objects}
        self._version = version
        self.lists += 1

    async def _watch(self, update: Callable[[Sequence[Watched]], None]) -> None:
        assert self._version is not None
        with contextlib.suppress(TimeoutError):  # the connection has died: watch again from the version
            async with asyncio.timeout(WATCH_SECONDS + WATCH_GRACE_SECONDS):
                async for event in self._api.watch(
                    self._path, self.selector, self._version, opened=lambda: update([*self._objects.values()])
                ):
                    if self._apply(event):
                        update([*self._objects.values()])

    def _apply(self, event: WatchEvent) -> bool:
        """Apply an event. Returns whether an object has changed."""
        if event.type == "BOOKMARK":
            self._version = self._decode(event.object, _bookmark).metadata.resource_version
            return False
        changed = self._decode(event.object, self._decoder)
        if event.type == "DELETED":
            self._objects.pop(changed.metadata.name, None)
        else:
            self._objects[changed.metadata.name] = changed
        self._version = changed.metadata.resource_version
        return True

    @staticmethod
    def _decode(raw: msgspec.Raw, decoder: msgspec.json.Decoder[Decoded]) -> Decoded:
        try:
            return decoder.decode(raw)
        except msgspec.MsgspecError as error:
            raise SourceError(f"an object has another form than expected: {error}") from None


class KubernetesSource(InstanceSource):
    """The servers of a Service, of pods with given labels, or of an InferencePool."""

    def __init__(self, config: Config, transport: HTTPTransport, resolve_secret: Callable[[Secret], str]) -> None:
        self._config = config
        self._api = KubernetesApi(config, transport, resolve_secret)
        self._namespace = config.namespace or _own_namespace()
        self.watch: ObjectWatch[Pod] | ObjectWatch[EndpointSlice] | ObjectWatch[InferencePool]
        self._pods: ObjectWatch[Pod] | None = None  # those of the pool
        if config.service is not None:
            self.description = f"Kubernetes Service {self._namespace}/{config.service}"
            selector = {"labelSelector": f"kubernetes.io/service-name={config.service}"}
            self.watch = ObjectWatch(
                self._api, self._collection("discovery.k8s.io", "endpointslices"), selector, EndpointSlice
            )
        elif config.inference_pool is not None:
            self.description = f"Kubernetes InferencePool {self._namespace}/{config.inference_pool}"
            selector = {"fieldSelector": f"metadata.name={config.inference_pool}"}
            self.watch = ObjectWatch(self._api, self._collection(POOL_GROUP, "inferencepools"), selector, InferencePool)
        else:
            self.description = f"Kubernetes pods {config.pods} in {self._namespace}"
            self.watch = self._watch_of_pods(config.pods or "")

    async def follow(self, update: Update) -> None:
        watch, port = self.watch, self._config.port
        if self._config.inference_pool is not None:
            await self._follow_pool(cast("ObjectWatch[InferencePool]", watch), update)
        elif self._config.service is not None:
            slices = cast("ObjectWatch[EndpointSlice]", watch)
            await slices.follow(lambda found: update(_by_name(instances_of_slices(found, port))))
        else:
            pods = cast("ObjectWatch[Pod]", watch)
            await pods.follow(lambda found: update(_by_name(instances_of_pods(found, port))))

    async def _follow_pool(self, watch: ObjectWatch[InferencePool], update: Update) -> None:
        """Follow the pool, and beside it the pods that it selects. A pool that is missing is a failure."""
        pools: asyncio.Queue[InferencePool | None] = asyncio.Queue()
        following = asyncio.ensure_future(watch.follow(lambda found: pools.put_nowait(next(iter(found), None))))
        changed = asyncio.ensure_future(pools.get())
        pods: asyncio.Future[None] | None = None
        try:
            while True:
                tasks = [task for task in (following, changed, pods) if task is not None]
                await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                for endless in (following, pods):
                    if endless is not None and endless.done():
                        endless.result()  # raises
                if not changed.done():
                    continue
                if (pool := changed.result()) is None:
                    raise SourceError(f"there is no InferencePool {self._config.inference_pool} in {self._namespace}")
                changed = asyncio.ensure_future(pools.get())
                await _cancelled(pods)
                pods = asyncio.ensure_future(self._follow_pods(pool, update))
        except SourceError:
            watch.restart()  # the pool may have changed since
            raise
        finally:
            for task in (following, changed, pods):
                await _cancelled(task)

    async def _follow_pods(self, pool: InferencePool, update: Update) -> None:
        if not pool.selector:
            raise SourceError(f"InferencePool {pool.metadata.name} has no matchLabels and would select every pod")
        if self._pods is None or self._pods.selector["labelSelector"] != pool.selector:
            self._pods = self._watch_of_pods(pool.selector)
        await self._pods.follow(lambda found: update(_by_name(instances_of_pool(pool, found))))

    def _watch_of_pods(self, selector: str) -> ObjectWatch[Pod]:
        return ObjectWatch(self._api, f"/api/v1/namespaces/{self._namespace}/pods", {"labelSelector": selector}, Pod)

    def _collection(self, group: str, plural: str) -> str:
        return f"/apis/{group}/v1/namespaces/{self._namespace}/{plural}"


def _by_name(found: Iterable[Instance]) -> list[Instance]:
    return sorted(found, key=lambda instance: instance.name)


async def _cancelled(task: asyncio.Future[Any] | None) -> None:
    if task is not None:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def _own_namespace() -> str:
    try:
        return (SERVICE_ACCOUNT / "namespace").read_text(encoding="utf-8").strip() or "default"
    except OSError:
        return "default"
