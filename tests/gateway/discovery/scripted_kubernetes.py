"""A server that speaks the list and watch protocol of the Kubernetes API, on a real socket, and fails on request."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import parse_qs, urlsplit

PAGE = 2  # objects in a page, however many the client wants


class ScriptedKubernetes:
    """The objects of one collection, and their history. `requests` has the query of each request."""

    def __init__(self) -> None:
        self.version = 100
        self.objects: dict[str, dict[str, Any]] = {}
        self.history: list[tuple[int, dict[str, Any]]] = []
        self.oldest = 0  # older versions have expired
        self.failing: tuple[int, str] | None = None  # status and message of every answer
        self.requests: list[dict[str, str]] = []
        self.paths: list[str] = []
        self.tokens: list[str] = []
        self.watchers: list[asyncio.Queue[dict[str, Any] | None]] = []
        self.changed = asyncio.Event()  # a watch has begun
        self.pools: ScriptedKubernetes | None = None  # has the InferencePools, if there are any

    def put(self, item: dict[str, Any]) -> None:
        name = item["metadata"]["name"]
        kind = "MODIFIED" if name in self.objects else "ADDED"
        self.objects[name] = item
        self._emit(kind, item)

    def delete(self, name: str) -> None:
        self._emit("DELETED", self.objects.pop(name))

    def bookmark(self) -> None:
        self._emit("BOOKMARK", {"kind": "Pod", "metadata": {"creationTimestamp": None}})

    def break_watches(self) -> None:
        """End all connections of watches in the middle."""
        for watcher in self.watchers:
            watcher.put_nowait(None)

    def expire(self, *, in_watch: bool) -> None:
        """Forget all versions until now. Open watches get an event, or else are broken."""
        self.oldest = self.version = self.version + 10
        status = {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old resource version"}
        for watcher in self.watchers:
            watcher.put_nowait({"type": "ERROR", "object": status} if in_watch else None)

    def _emit(self, kind: str, item: dict[str, Any]) -> None:
        self.version += 1
        item = {**item, "metadata": {**item["metadata"], "resourceVersion": str(self.version)}}
        event = {"type": kind, "object": item}
        if kind != "BOOKMARK":
            self.history.append((self.version, event))
        for watcher in self.watchers:
            watcher.put_nowait(event)

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                if not await self._answer(head.decode(), writer):
                    return
        except (asyncio.IncompleteReadError, ConnectionError):
            return
        finally:
            writer.close()

    async def _answer(self, head: str, writer: asyncio.StreamWriter) -> bool:
        url = urlsplit(head.split()[1])
        if self.pools is not None and url.path.endswith("/inferencepools"):
            return await self.pools._answer(head, writer)
        query = {name: values[0] for name, values in parse_qs(url.query).items()}
        self.requests.append(query)
        self.paths.append(url.path)
        self.tokens += [line.split(": Bearer ")[1] for line in head.splitlines() if ": Bearer " in line]
        if self.failing is not None:
            code, message = self.failing
            _reply(writer, code, {"kind": "Status", "code": code, "message": message})
            return True
        if query.get("watch") == "true":
            return await self._watch(int(query["resourceVersion"]), writer)
        if (start := query.get("continue")) and int(start.split("/")[0]) < self.oldest:
            _reply(writer, 410, {"kind": "Status", "code": 410, "message": "the continue parameter is too old"})
            return True
        version, first = (int(part) for part in (start or f"{self.version}/0").split("/"))
        items = list(self.objects.values())
        metadata = {"resourceVersion": str(version)}
        if first + PAGE < len(items):
            metadata["continue"] = f"{version}/{first + PAGE}"
        _reply(writer, 200, {"kind": "List", "metadata": metadata, "items": items[first : first + PAGE]})
        return True

    async def _watch(self, version: int, writer: asyncio.StreamWriter) -> bool:
        if version < self.oldest:
            _reply(writer, 410, {"kind": "Status", "code": 410, "message": "too old resource version"})
            return True
        events: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
        for at, earlier in self.history:
            if at > version:
                events.put_nowait(earlier)
        self.watchers.append(events)
        self.changed.set()
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n")
        try:
            while (event := await events.get()) is not None:
                line = json.dumps(event).encode() + b"\n"
                for part in (line[:20], line[20:]):  # an event need not arrive in one piece
                    writer.write(b"%x\r\n%b\r\n" % (len(part), part))
                    await writer.drain()
        finally:
            self.watchers.remove(events)
        return False

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[str]:
        server = await asyncio.start_server(self, "127.0.0.1", 0)
        try:
            yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        finally:
            self.break_watches()
            if self.pools is not None:
                self.pools.break_watches()
            server.close()


def _reply(writer: asyncio.StreamWriter, code: int, content: dict[str, Any]) -> None:
    body = json.dumps(content).encode()
    writer.write(b"HTTP/1.1 %d X\r\ncontent-length: %d\r\n\r\n%b" % (code, len(body), body))


def a_pod(
    name: str, address: str = "10.0.0.1", *, uid: str = "", ready: bool = True, **metadata: Any
) -> dict[str, Any]:
    return {
        "metadata": {"name": name, "uid": uid or f"uid-{name}", **metadata},
        "spec": {"containers": [{"name": "engine", "ports": [{"name": "http", "containerPort": 8000}]}]},
        "status": {
            "phase": "Running",
            "podIP": address,
            "podIPs": [{"ip": address}],
            "conditions": [{"type": "Ready", "status": "True" if ready else "False"}],
        },
    }


def a_pool(name: str, *ports: int, **labels: str) -> dict[str, Any]:
    return {
        "metadata": {"name": name, "uid": f"uid-{name}"},
        "spec": {
            "selector": {"matchLabels": labels},
            "targetPorts": [{"number": port} for port in ports],
            "endpointPickerRef": {"name": f"{name}-epp", "port": {"number": 9002}},
        },
    }


def a_slice(name: str, *endpoints: dict[str, Any], kind: str = "IPv4") -> dict[str, Any]:
    return {
        "metadata": {"name": name, "labels": {"kubernetes.io/service-name": "vllm"}},
        "addressType": kind,
        "ports": [{"name": "http", "port": 8000, "protocol": "TCP"}],
        "endpoints": list(endpoints),
    }


def an_endpoint(pod: str, address: str, *, ready: bool | None = True, terminating: bool = False) -> dict[str, Any]:
    return {
        "addresses": [address],
        "conditions": {"ready": ready, "serving": True, "terminating": terminating},
        "targetRef": {"kind": "Pod", "name": pod, "uid": f"uid-{pod}"},
        "zone": "zone-a",
    }
