"""Sends random requests to every endpoint of a real gateway, and fails if one is answered by a 500 or not at all.

The deployments are scripted: they answer every request rightly in the format of its path. So a 500, a 502 or a lost
connection is the gateway's own fault. Requests refer to objects that earlier ones created: responses, conversations,
chats, messages of threads, files and batches. `python -m tests.fuzz.endpoints --minutes 5 --seed 1`.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
import tempfile
import time
from collections import Counter, deque
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import httpx2

from tests.e2e.faults.upstreams import Request, listening
from tests.e2e.processes import PRICE, Gateway, gateway, key, simple_policy
from tests.fuzz.bodies import ADMIN, BODIES, broken, changed, encoded, upload
from tests.gateway.providers.scripted_server import STREAM_END, STREAM_HEAD, chunked, json_response
from tests.gateway.providers.wires import MESSAGE_STOP, block_delta, block_start, event, message, message_start

MODELS = ("plain", "native", "claude", "mixed", "absent", "")
PATHS = (
    "models",
    "models/plain",
    "responses/{response}",
    "responses/{response}?stream=true&starting_after=1",
    "responses/{response}/input_items",
    "responses/{response}/input_items?after={item}&limit=1",
    "responses/{response}/cancel",
    "conversations/{conversation}",
    "conversations/{conversation}/items",
    "conversations/{conversation}/items?after={item}&order=asc",
    "conversations/{conversation}/items/{item}?include=y",
    "chat/completions?limit=2&metadata%5Ba%5D=b",
    "chat/completions?after={chat}",
    "chat/completions/{chat}",
    "chat/completions/{chat}/messages",
    "files",
    "files/{file}",
    "files/{file}/content",
    "batches",
    "batches?after={batch}&limit=1",
    "batches/{batch}",
    "batches/{batch}/cancel",
    "x",
)
ADMIN_KEY = "an-admin-key-of-some-length"
THREADS = "messages?c"  # begins the paths of messages in threads
IDS_KEPT = 20  # of each kind of object
# Ids of objects in answers. Stored chats have the id that the deployment gave.
IDS = {
    "response": re.compile(rb'"id":\s*"(resp_\w+)"'),
    "conversation": re.compile(rb'"id":\s*"(conv_\w+)"'),
    "chat": re.compile(rb'"id":\s*"(chatcmpl-[\w-]+)"'),
    "message": re.compile(rb'"id":\s*"(msg_[0-9a-f]{24})"'),
    "item": re.compile(rb'"id":\s*"((?:msg|fc|rs)_\w+)"'),
    "file": re.compile(rb'"id":\s*"(file-\w+)"'),
    "batch": re.compile(rb'"id":\s*"(batch_\w+)"'),
}
HEADERS: tuple[dict[str, str], ...] = (
    {}, {"anthropic-version": "2023-06-01", "anthropic-beta": "a,b"}, {"idempotency-key": "k"}, {"traceparent": "x"},
    {"x-stainless-read-timeout": "-1"}, {"content-type": "text/plain"}, {"x-session-id": "\xc3\xa9"},
)  # fmt: skip
NO_HEADERS: Mapping[str, str] = MappingProxyType({})
JSON_TYPE = "application/json"
FAULTS = (500, 502, 504)
TIMEOUT_SECONDS = 60.0
FAULTS_SHOWN = 20
TRACE_CHARACTERS = 1500  # of each stack trace that is shown
RESPONSE = {
    "id": "resp_up", "object": "response", "created_at": 1, "status": "completed", "error": None, "model": "m",
    "output": [], "usage": {"input_tokens": 3, "output_tokens": 1, "total_tokens": 4},
}  # fmt: skip
JSON_ANSWERS: dict[str, Any] = {
    "/v1/messages": message([{"type": "text", "text": "a"}]),
    "/v1/responses": RESPONSE,
    "/v1/messages/count_tokens": {"input_tokens": 3},
    "/v1/responses/input_tokens": {"object": "response.input_tokens", "input_tokens": 3},
    "/v1/responses/compact": {"id": "resp_up", "object": "response.compaction", "created_at": 1, "output": []},
    "/v1/embeddings": {
        "object": "list", "model": "m", "data": [{"object": "embedding", "index": 0, "embedding": [0.1]}],
        "usage": {"prompt_tokens": 2, "total_tokens": 2},
    },
}  # fmt: skip
STREAMS = {
    "/v1/messages": message_start() + block_start(0, type="text", text="")
    + block_delta(0, type="text_delta", text="a") + MESSAGE_STOP,
    "/v1/responses": event(type="response.created", sequence_number=0, response={**RESPONSE, "status": "in_progress"})
    + event(type="response.completed", sequence_number=1, response=RESPONSE),
}  # fmt: skip


async def answer(request: Request) -> None:
    """Answer rightly in the format of the path."""
    if request.path in STREAMS and request.body.get("stream") is True:
        await request.write(STREAM_HEAD + chunked(STREAMS[request.path]) + STREAM_END)
    elif request.path in ("/v1/chat/completions", "/v1/completions"):
        await request.whole(3)
    else:
        await request.write(json_response(json.dumps(JSON_ANSWERS.get(request.path, {"data": []})).encode()))


def policy_of(ports: dict[str, int]) -> dict[str, Any]:
    urls = {name: f"http://127.0.0.1:{port}/v1" for name, port in ports.items()}
    of: dict[str, Any] = {"model": "m", "price": PRICE}
    deployments = [
        {"name": "plain", "base_url": urls["plain"], **of},
        {"name": "native", "base_url": urls["native"], "native": ["responses"], **of},
        {"name": "claude", "provider": "anthropic", "base_url": urls["claude"], **of},
    ]
    models: list[dict[str, Any]] = [{"name": name, "deployments": [name]} for name in urls]
    models.append({"name": "mixed", "deployments": ["plain", "claude", "native"]})
    return simple_policy("http://unused", deployments=deployments, models=models, responses={"keep": "1h"})


class Sent(NamedTuple):
    """One request and its answer. A status of 0 says that the connection broke."""

    path: str
    status: int
    body: bytes
    reply: bytes


class Fuzzer:
    """Sends random requests, and remembers the ids in the answers."""

    def __init__(self, client: httpx2.Client, started: Gateway, random_: random.Random) -> None:
        self._client = client
        self._started = started
        self._random = random_
        self._before = ""  # method and path of the request before this one
        self._ids = {kind: deque(["x"], IDS_KEPT) for kind in IDS}

    def send_one(self) -> Sent:
        """Send one random request."""
        kind = self._random.random()
        if kind < 0.1:
            return self._send_to_admin()
        if kind < 0.2:
            path, method = self._random.choice(PATHS), self._random.choice(("GET", "GET", "DELETE", "POST", "PUT"))
            return self._send(method, path, b"")
        if kind < 0.22:
            lines = [
                {"custom_id": str(number), "method": "POST", "url": f"/v1/{path}", "body": self._changed(BODIES[path])}
                for number, path in enumerate(
                    self._random.choices(["chat/completions", "responses", "embeddings"], k=2)
                )
            ]
            form, kind_of_form = upload(lines)
            return self._send("POST", "files", self._broken(form), {"content-type": kind_of_form})
        path = self._random.choice([*BODIES])
        return self._send("POST", path, self._broken(encoded(self._changed(BODIES[path]))))

    def _send_to_admin(self) -> Sent:
        method, path, template = self._random.choice(ADMIN)
        body = b"" if template is None else self._broken(encoded(self._changed(template)))
        return self._request(method, self._started.admin_url, path, body, {"authorization": f"Bearer {ADMIN_KEY}"})

    def _send(self, method: str, path: str, body: bytes, more: Mapping[str, str] = NO_HEADERS) -> Sent:
        headers = {"authorization": f"Bearer {key('dev')}", **self._random.choice(HEADERS), **more}
        return self._request(method, f"{self._started.url}/v1", path, body, headers)

    def _request(self, method: str, url: str, path: str, body: bytes, headers: Mapping[str, str]) -> Sent:
        sent_headers = {
            name.encode(): value.encode("latin-1") for name, value in {"content-type": JSON_TYPE, **headers}.items()
        }
        sent = self._with_ids(body)
        try:
            reply = self._client.request(
                method, f"{url}/{self._with_ids(path.encode()).decode()}", content=sent, headers=sent_headers
            )
        except httpx2.TransportError as error:
            return Sent(path, 0, sent, f"{error!r} after {self._before}".encode())
        self._before = f"{method} {path}, {len(sent)} bytes: {reply.status_code} {dict(reply.headers)}"
        for kind, pattern in IDS.items():
            if kind == "message" and not path.startswith(THREADS):
                continue  # items of responses have ids of the same form
            self._ids[kind].extend(found.decode() for found in pattern.findall(reply.content))
        return Sent(path, reply.status_code, sent, reply.content)

    def _changed(self, template: dict[str, Any]) -> Any:
        chance = self._random.choice((0.0, 0.01, 0.05, 0.2))
        return changed({"model": self._random.choice(MODELS), **template}, self._random, chance)

    def _broken(self, body: bytes) -> bytes:
        return broken(body, self._random) if self._random.random() < 0.1 else body

    def _with_ids(self, text: bytes) -> bytes:
        """Replace placeholders by the ids of objects, which may have been deleted."""
        if b"{" not in text:
            return text
        for kind, known in self._ids.items():
            text = text.replace(b"{%b}" % kind.encode(), self._random.choice(known).encode())
        return text


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    statuses, faults = Counter[tuple[str, int]](), list[Sent]()
    end = time.monotonic() + 60 * arguments.minutes
    with (
        tempfile.TemporaryDirectory() as folder,
        listening(dict.fromkeys(("plain", "native", "claude"), answer)) as upstreams,
        gateway(Path(folder), policy_of(upstreams.ports), admin_key=ADMIN_KEY, admin_port="0") as started,
        httpx2.Client(timeout=TIMEOUT_SECONDS) as client,
    ):
        fuzzer = Fuzzer(client, started, random.Random(arguments.seed))
        while time.monotonic() < end:
            sent = fuzzer.send_one()
            statuses[sent.path, sent.status] += 1
            if sent.status in FAULTS or sent.status == 0:
                faults.append(sent)
        traces = [line for line in started.log.read_text().splitlines() if "Traceback" in line]
    paths = sorted({path for path, _ in statuses})
    for path in paths:
        print(path, dict(sorted((status, count) for (of, status), count in statuses.items() if of == path)))
    print(f"{sum(statuses.values())} requests, {len(paths)} paths, {len(faults)} faults, {len(traces)} stack traces")
    for sent in faults[:FAULTS_SHOWN]:
        print(sent.path, sent.status, sent.body[:500], sent.reply[:300])
    for trace in traces[:FAULTS_SHOWN]:
        print(trace[-TRACE_CHARACTERS:])
    return 1 if faults or traces else 0


if __name__ == "__main__":
    sys.exit(main())
