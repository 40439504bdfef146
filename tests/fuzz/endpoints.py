"""Sends random requests to every endpoint of a real gateway, and fails if one is answered by a 500 or not at all.

The deployments are scripted: they answer every request rightly in the format of its path. So a 500, a 502 or a lost
connection is the gateway's own fault. `python -m tests.fuzz.endpoints --minutes 5 --seed 1`.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx2

from tests.e2e.faults.upstreams import Request, listening
from tests.e2e.processes import PRICE, Gateway, gateway, key, simple_policy
from tests.fuzz.bodies import BODIES, broken, changed, encoded
from tests.gateway.providers.scripted_server import STREAM_END, STREAM_HEAD, chunked, json_response
from tests.gateway.providers.wires import MESSAGE_STOP, block_delta, block_start, event, message, message_start

MODELS = ("plain", "native", "claude", "mixed", "absent", "")
PATHS = (
    "models",
    "models/plain",
    "responses/resp_x",
    "responses/resp_x?stream=true&starting_after=1",
    "responses/resp_x/input_items",
    "responses/resp_x/cancel",
    "conversations/conv_x",
    "conversations/conv_x/items",
    "conversations/conv_x/items/x?include=y",
    "chat/completions?limit=2&metadata%5Ba%5D=b",
    "chat/completions/x",
    "chat/completions/x/messages",
    "files",
    "files/x",
    "batches",
    "x",
)
HEADERS: tuple[dict[str, str], ...] = (
    {}, {"anthropic-version": "2023-06-01", "anthropic-beta": "a,b"}, {"idempotency-key": "k"}, {"traceparent": "x"},
    {"x-stainless-read-timeout": "-1"}, {"content-type": "text/plain"}, {"x-session-id": "\xc3\xa9"},
)  # fmt: skip
FAULTS = (500, 502, 504)
TIMEOUT_SECONDS = 60.0
FAULTS_SHOWN = 20
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


def one_request(client: httpx2.Client, started: Gateway, random_: random.Random) -> tuple[str, int, bytes, bytes]:
    """Send one random request. Returns its path, status (0: the connection broke), body and answer."""
    headers = {"authorization": f"Bearer {key('dev')}", "content-type": "application/json", **random_.choice(HEADERS)}
    if random_.random() < 0.1:
        path, method, body = random_.choice(PATHS), random_.choice(("GET", "DELETE", "POST", "PUT")), b""
    else:
        path, method = random_.choice([*BODIES]), "POST"
        chance = random_.choice((0.0, 0.01, 0.05, 0.2))
        body = encoded(changed({"model": random_.choice(MODELS), **BODIES[path]}, random_, chance))
        if random_.random() < 0.1:
            body = broken(body, random_)
    try:
        sent = {name.encode(): value.encode("latin-1") for name, value in headers.items()}
        reply = client.request(method, f"{started.url}/v1/{path}", content=body, headers=sent)
    except httpx2.TransportError as error:
        return path, 0, body, repr(error).encode()
    return path, reply.status_code, body, reply.content


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    random_, statuses, faults = random.Random(arguments.seed), Counter[tuple[str, int]](), []
    end = time.monotonic() + 60 * arguments.minutes
    with (
        tempfile.TemporaryDirectory() as folder,
        listening(dict.fromkeys(("plain", "native", "claude"), answer)) as upstreams,
        gateway(Path(folder), policy_of(upstreams.ports)) as started,
        httpx2.Client(timeout=TIMEOUT_SECONDS) as client,
    ):
        while time.monotonic() < end:
            path, status, body, reply = one_request(client, started, random_)
            statuses[path, status] += 1
            if status in FAULTS or status == 0:
                faults.append((path, status, body, reply))
        logged = started.log.read_text().count("a request failed in the gateway itself")
    for path in sorted({path for path, _ in statuses}):
        print(path, dict(sorted((status, count) for (of, status), count in statuses.items() if of == path)))
    print(f"{sum(statuses.values())} requests, {len(faults)} faults, {logged} stack traces")
    for path, status, body, reply in faults[:FAULTS_SHOWN]:
        print(path, status, body[:500], reply[:300])
    return 1 if faults or logged else 0


if __name__ == "__main__":
    sys.exit(main())
