"""Client of the Kubernetes API: lists objects in pages, and watches them. https://kubernetes.io/docs/reference/using-api/

Each request has the token that the file has now, because projected tokens are replaced every hour. All requests have a
time limit; a watch is ended by the API server after `WATCH_SECONDS`, and by the client a little later if the connection
has died.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any

import httpx2
import msgspec

from gateway.discovery.base import SourceError
from gateway.policy import KubernetesSource as Config
from gateway.policy import Secret, UpstreamTLS
from gateway.providers.transport import TLS_EXTENSION, HTTPTransport, UnusableFile
from gateway.settings import SettingsError, in_cluster_api

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
LIST_SECONDS = 30.0
WATCH_SECONDS = 120
WATCH_GRACE_SECONDS = 15.0  # after which a watch that the server should have ended counts as dead
PAGE_OBJECTS = 250
OBJECTS_MAX = 10_000  # of all pages of one list
PAGE_MAX_BYTES = 32 * 1024 * 1024
EVENT_MAX_BYTES = 4 * 1024 * 1024
GONE = 410


class ExpiredVersion(Exception):
    """The API server no longer has the resource version (410 Gone). The objects must be listed again."""


class _ListMeta(msgspec.Struct, rename="camel"):
    resource_version: str = ""
    continue_: str = msgspec.field(default="", name="continue")


class _Page(msgspec.Struct):
    metadata: _ListMeta = msgspec.field(default_factory=_ListMeta)
    items: list[msgspec.Raw] | None = None


class _Status(msgspec.Struct):
    code: int = 0
    message: str = ""
    reason: str = ""


class WatchEvent(msgspec.Struct):
    """One line of a watch. `type` is ADDED, MODIFIED, DELETED, BOOKMARK or ERROR."""

    type: str
    object: msgspec.Raw


_page = msgspec.json.Decoder(_Page).decode
_status = msgspec.json.Decoder(_Status).decode
_event = msgspec.json.Decoder(WatchEvent).decode


class KubernetesApi:
    """Reads one cluster. Raises `SourceError` for everything that fails, with the missing permission if that is it."""

    def __init__(self, config: Config, transport: HTTPTransport, resolve_secret: Callable[[Secret], str]) -> None:
        api = config.api or in_cluster_api()
        if api is None:
            raise SourceError("set api: this process does not run in a Kubernetes cluster (no KUBERNETES_SERVICE_HOST)")
        self._api = api.rstrip("/")
        self._transport = transport
        self._resolve_secret = resolve_secret
        self._token = config.token
        if config.token is None and config.api is None:
            self._token = Secret(file=str(SERVICE_ACCOUNT / "token"))
        ca = config.ca or (str(SERVICE_ACCOUNT / "ca.crt") if config.api is None else None)
        self._tls = UpstreamTLS(ca=ca) if ca is not None and self._api.startswith("https:") else None

    async def list_objects(self, path: str, selector: Mapping[str, str]) -> tuple[list[msgspec.Raw], str]:
        """All objects of a collection, and the resource version from which to watch them."""
        objects: list[msgspec.Raw] = []
        parameters = {**selector, "limit": str(PAGE_OBJECTS)}
        while True:
            try:
                async with asyncio.timeout(LIST_SECONDS), self._get(path, parameters) as response:
                    page = _page(await _body(response, PAGE_MAX_BYTES))
            except TimeoutError:
                raise SourceError(f"the API server did not answer within {LIST_SECONDS:g} s") from None
            except msgspec.MsgspecError as error:
                raise SourceError(f"its list is not a Kubernetes list: {error}") from None
            objects += page.items or ()
            if len(objects) > OBJECTS_MAX:
                raise SourceError(f"more than {OBJECTS_MAX} objects match; narrow the selector")
            if not page.metadata.continue_:
                return objects, page.metadata.resource_version
            parameters["continue"] = page.metadata.continue_

    async def watch(
        self, path: str, selector: Mapping[str, str], version: str, opened: Callable[[], None]
    ) -> AsyncIterator[WatchEvent]:
        """The changes after a resource version, until the server ends the watch. Raises `ExpiredVersion`, too.

        Calls `opened` when the server has accepted the watch. Has no time limit; the caller sets one.
        """
        parameters = {
            **selector, "watch": "true", "resourceVersion": version, "allowWatchBookmarks": "true",
            "timeoutSeconds": str(WATCH_SECONDS),
        }  # fmt: skip
        async with self._get(path, parameters) as response:
            opened()
            rest = b""
            async for part in response.aiter_raw():
                *lines, rest = (rest + part).split(b"\n")
                if max(map(len, (*lines, rest))) > EVENT_MAX_BYTES:
                    raise SourceError(f"an object is longer than {EVENT_MAX_BYTES} bytes")
                for line in lines:
                    if line.strip():
                        yield _checked(line)

    @contextlib.asynccontextmanager
    async def _get(self, path: str, parameters: Mapping[str, str]) -> AsyncIterator[httpx2.Response]:
        extensions: dict[str, Any] = {TLS_EXTENSION: self._tls}
        headers = {"accept": "application/json", "accept-encoding": "identity", "user-agent": "warmpath"}
        try:
            if self._token is not None:
                token = await asyncio.to_thread(self._resolve_secret, self._token)
                headers["authorization"] = f"Bearer {token}"
            request = httpx2.Request("GET", self._api + path, params=parameters, headers=headers, extensions=extensions)
            response = await self._transport.handle_async_request(request)
            try:
                if response.status_code != 200:
                    await _raise_status(response)
                yield response
            finally:
                await response.aclose()
        except (SettingsError, UnusableFile) as error:
            raise SourceError(str(error)) from None
        except httpx2.TransportError as error:
            raise SourceError(
                f"the API server at {self._api} cannot be read: {error or type(error).__name__}"
            ) from None


def _checked(line: bytes) -> WatchEvent:
    """Decode a line of a watch. Raises for an event of type ERROR."""
    try:
        event = _event(line)
        if event.type != "ERROR":
            return event
        status = _status(event.object)
    except msgspec.MsgspecError as error:
        raise SourceError(f"its watch has a line that is not an event: {error}") from None
    if status.code == GONE:
        raise ExpiredVersion
    raise SourceError(f"its watch ended with an error: {status.code} {status.message or status.reason}")


async def _raise_status(response: httpx2.Response) -> None:
    body = await _body(response, 64 * 1024)
    if response.status_code == GONE:
        raise ExpiredVersion
    try:
        status = _status(body)
    except msgspec.MsgspecError:
        status = _Status()
    message = status.message or status.reason or "no reason given"
    if response.status_code == 403:
        message += "; its service account needs the verbs list and watch (see deploy/kubernetes/rbac.yaml)"
    raise SourceError(f"the API server answers {response.status_code}: {message}")


async def _body(response: httpx2.Response, max_bytes: int) -> bytes:
    body = bytearray()
    async for part in response.aiter_raw():
        body += part
        if len(body) > max_bytes:
            raise SourceError(f"the API server's answer is longer than {max_bytes} bytes")
    return bytes(body)
