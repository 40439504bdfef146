"""Source: the EndpointSlices of a Service, or pods with given labels, in a Kubernetes cluster.

    list  -->  watch from the list's version  -->  each event, each bookmark moves the version
                 |  the server ends the watch, or the connection breaks: watch again from the version
                 |  410 Gone, the version has expired: list again

Only the list and the events of the watch change what is known, so a failure of the API server changes nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import TypeVar

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
    Pod,
    instances_of_pods,
    instances_of_slices,
)
from gateway.policy import KubernetesSource as Config
from gateway.policy import Secret
from gateway.providers.transport import HTTPTransport

WATCH_PAUSE_SECONDS = 1.0  # between the starts of two watches, if the server ends them at once
LISTS_MAX = 3  # in a row that expire before they are complete or watched


Decoded = TypeVar("Decoded")
_bookmark = msgspec.json.Decoder(AnyObject)


class KubernetesSource(InstanceSource):
    """Watches a cluster. The objects and their version are kept when `follow` fails, for when it is called again."""

    def __init__(self, config: Config, transport: HTTPTransport, resolve_secret: Callable[[Secret], str]) -> None:
        self._config = config
        self._api = KubernetesApi(config, transport, resolve_secret)
        namespace = config.namespace or _own_namespace()
        if config.service is not None:
            self.description = f"Kubernetes Service {namespace}/{config.service}"
            self._path = f"/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices"
            self._selector = {"labelSelector": f"kubernetes.io/service-name={config.service}"}
            self._decoder: msgspec.json.Decoder[Pod | EndpointSlice] = msgspec.json.Decoder(EndpointSlice)
        else:
            self.description = f"Kubernetes pods {config.pods} in {namespace}"
            self._path = f"/api/v1/namespaces/{namespace}/pods"
            self._selector = {"labelSelector": config.pods or ""}
            self._decoder = msgspec.json.Decoder(Pod)
        self._objects: dict[str, Pod | EndpointSlice] = {}  # by name
        self._version: str | None = None  # from which to watch; None if the objects must be listed
        self.lists = 0  # since the start

    async def follow(self, update: Update) -> None:
        loop, expired = asyncio.get_running_loop(), 0
        while True:
            began = loop.time()
            try:
                if self._version is None:
                    await self._list()
                    update(self._instances())
                await self._watch(update)
                expired = 0
            except ExpiredVersion:
                self._version = None
                expired += 1
                if expired >= LISTS_MAX:
                    raise SourceError(f"its lists have expired {expired} times in a row (410 Gone)") from None
                continue
            await asyncio.sleep(max(0.0, began + WATCH_PAUSE_SECONDS - loop.time()))

    async def _list(self) -> None:
        raw, version = await self._api.list_objects(self._path, self._selector)
        objects = [self._decode(each, self._decoder) for each in raw]
        self._objects = {each.metadata.name: each for each in objects}
        self._version = version
        self.lists += 1

    async def _watch(self, update: Update) -> None:
        assert self._version is not None
        with contextlib.suppress(TimeoutError):  # the connection has died: watch again from the version
            async with asyncio.timeout(WATCH_SECONDS + WATCH_GRACE_SECONDS):
                async for event in self._api.watch(
                    self._path, self._selector, self._version, opened=lambda: update(self._instances())
                ):
                    if self._apply(event):
                        update(self._instances())

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

    def _instances(self) -> list[Instance]:
        pods = [each for each in self._objects.values() if isinstance(each, Pod)]
        slices = [each for each in self._objects.values() if isinstance(each, EndpointSlice)]
        found = [*instances_of_pods(pods, self._config.port), *instances_of_slices(slices, self._config.port)]
        return sorted(found, key=lambda instance: instance.name)


def _own_namespace() -> str:
    try:
        return (SERVICE_ACCOUNT / "namespace").read_text(encoding="utf-8").strip() or "default"
    except OSError:
        return "default"
