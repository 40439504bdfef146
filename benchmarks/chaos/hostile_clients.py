"""The clients that do what no client should, and the reply that each must get.

Each function is one visit. It returns what happened, with a fault if the gateway did not name the cause of a refusal,
failed with a bare 500, or served what it must not.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Awaitable, Callable
from typing import Any

from benchmarks.chaos.calls import Call, Ending, cause_of, exchange, parse
from benchmarks.chaos.faults import ChaosGateway, Gateways
from tests.e2e.processes import DEMO, key

VISIT_SECONDS = 60.0
DRIP_SECONDS = 12.0  # longer than the gateway waits for a head
BODY_BYTES_MAX = 2**20  # that the gateways accept
TENANT = "hostile"

Visit = Callable[[ChaosGateway, random.Random], Awaitable[Ending]]


def chat(rng: random.Random, **fields: Any) -> dict[str, Any]:
    return {"model": DEMO, "max_tokens": 4, "messages": [{"role": "user", "content": f"{rng.random()}"}], **fields}


async def raw(gateway: ChaosGateway, data: bytes, *, read: bool = True) -> bytes:
    """Send these bytes and read to the end of the connection."""
    async with asyncio.timeout(VISIT_SECONDS):
        reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
        try:
            writer.write(data)
            await writer.drain()
            return await reader.read(-1) if read else b""
        finally:
            writer.transport.abort()


def head(length: int, *lines: str, path: str = "chat/completions", who: str = TENANT) -> bytes:
    usual = ["host: x", f"authorization: Bearer {key(who)}", f"content-length: {length}", "connection: close"]
    return "\r\n".join([f"POST /v1/{path} HTTP/1.1", *usual, *lines, "", ""]).encode()


def check_reply(received: bytes, *statuses: int) -> Ending:
    """Check the reply to a request that must get one of these statuses. A refusal must name its cause."""
    reply = parse(received)
    cause = cause_of(reply.error)
    what = f"{reply.status} {cause}".strip()
    if reply.status not in statuses and reply.status not in (503,):
        return Ending(what, cause, f"status {reply.status} instead of {statuses}: {reply.content[:300]!r}")
    if reply.status != 200 and not cause:
        return Ending(what, cause, f"a refusal that names no cause: {received[:500]!r}")
    return Ending(what, cause)


async def leave_midway(gateway: ChaosGateway, rng: random.Random) -> Ending:
    body = json.dumps(chat(rng, stream=True, max_tokens=60, ignore_eos=True)).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    try:
        writer.write(head(len(body)) + body)
        if rng.random() < 0.5:
            async with asyncio.timeout(VISIT_SECONDS):
                for _ in range(rng.randint(1, 6)):
                    await reader.read(1000)
        else:
            await asyncio.sleep(rng.random() * 0.1)
    finally:
        writer.transport.abort()
    return Ending("left")


BAD_FIELDS: list[dict[str, Any]] = [
    {"messages": "no list"}, {"messages": [{"role": 7}]}, {"max_tokens": -1}, {"max_tokens": 10**30}, {"n": "two"},
    {"temperature": "hot"}, {"stream": "perhaps"}, {"model": ["a"]}, {"messages": [[[[[[]]]]]]},
    {"response_format": {"type": "json_schema"}}, {"tools": [{"type": "function"}]}, {"logit_bias": {"x": "y"}},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nothing"}}}},
]  # fmt: skip


async def bad_body(gateway: ChaosGateway, rng: random.Random) -> Ending:
    body = {**chat(rng), **rng.choice(BAD_FIELDS)}
    return check_reply(await exchange(gateway.port, Call("bad", "chat/completions", body, TENANT)), 400, 404, 422)


async def no_json(gateway: ChaosGateway, rng: random.Random) -> Ending:
    body = rng.choice([b"{", b"\xff\xfe", b"[" * 5000, b'{"model": "\\ud800"}', b"", b"null", b'{"a":1,"a":2}'])
    return check_reply(await raw(gateway, head(len(body)) + body), 400)


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


async def bad_grammar(gateway: ChaosGateway, rng: random.Random) -> Ending:
    """Schemas and patterns that cost a grammar compiler much. They may be served if they cost no one else."""
    schema = rng.choice([
        nested(150), {"type": "string", "pattern": "(z{2000}){2000}"}, {"$ref": "#"},
        {"type": "object", "properties": {f"p{number}": {"type": "string"} for number in range(600)}},
    ])  # fmt: skip
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}
    call = Call("grammar", "chat/completions", chat(rng, response_format=wanted), TENANT)
    return check_reply(await exchange(gateway.port, call), 200, 400, 422)


async def giant_body(gateway: ChaosGateway, rng: random.Random) -> Ending:
    piece = b"x" * 65536
    count = BODY_BYTES_MAX // len(piece) + rng.randint(1, 8)
    return check_reply(await raw(gateway, head(count * len(piece)) + piece * count), 413)


BAD_HEADS = [
    b"GET\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00\x01", b"POST /v1/chat/completions HTTP/1.1\r\n\r\n",
    b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: -5\r\n\r\n",
    b"POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\nhost: b\r\n\r\n", b"\0" * 100,
    b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\ncontent-length: 5\r\n\r\nzz\r\n",
    b"POST /v1/x HTTP/1.1\r\nhost: x\r\nbad header\r\n\r\n", b"A" * 100_000,
]  # fmt: skip


async def bad_http(gateway: ChaosGateway, rng: random.Random) -> Ending:
    async with asyncio.timeout(VISIT_SECONDS):
        reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
        try:
            writer.write(rng.choice(BAD_HEADS))
            writer.write_eof()
            received = await reader.read(-1)
        finally:
            writer.transport.abort()
    if not received:
        return Ending("closed")
    status = int(received[9:12])
    return Ending(str(status), fault="" if 400 <= status < 500 else f"malformed HTTP got {received[:200]!r}")


async def slow_head(gateway: ChaosGateway, rng: random.Random) -> Ending:
    """A head that arrives byte by byte."""
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    began = time.monotonic()
    try:
        for byte in head(2):
            writer.write(bytes([byte]))
            await asyncio.sleep(0.2)
            if reader.at_eof():
                return Ending("closed")
            if time.monotonic() - began > DRIP_SECONDS:
                break
        async with asyncio.timeout(VISIT_SECONDS):
            await reader.read(-1)
    finally:
        writer.transport.abort()
    return Ending("closed")


async def slow_reader(gateway: ChaosGateway, rng: random.Random) -> Ending:
    body = json.dumps(chat(rng, stream=True, max_tokens=200, ignore_eos=True)).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port, limit=1024)
    try:
        writer.write(head(len(body)) + body)
        await asyncio.sleep(rng.uniform(0.5, 5.0))
        async with asyncio.timeout(VISIT_SECONDS):
            return check_reply(await reader.read(-1), 200, 429)
    finally:
        writer.transport.abort()


async def wrong_key(gateway: ChaosGateway, rng: random.Random) -> Ending:
    wrong = rng.choice(
        [f"wp-acme-{rng.random()}", "wp-nobody-0123456789abcdef", "", "x" * 20_000, f"sk-{rng.random()}"]
    )
    body = json.dumps(chat(rng)).encode()
    sent = head(len(body)).replace(key(TENANT).encode(), wrong.encode()) + body
    return check_reply(await raw(gateway, sent), 401)


async def upgrade(gateway: ChaosGateway, rng: random.Random) -> Ending:
    body = json.dumps(chat(rng)).encode()
    offer = ["connection: upgrade, HTTP2-Settings", "upgrade: h2c", "HTTP2-Settings: AAMAAABkAAQCAAAAAAIAAAAA"]
    sent = head(len(body), *offer).replace(b"connection: close\r\n", b"") + body + head(2) + b"[]"
    received = await raw(gateway, sent)
    first = parse(received)
    return Ending(f"{first.status}", fault="" if first.status in (200, 503) else f"{received[:300]!r}")


async def unknown(gateway: ChaosGateway, rng: random.Random) -> Ending:
    body = b"{}" if rng.random() < 0.5 else json.dumps(chat(rng, model="no-such-model")).encode()
    path = "nothing/here" if body == b"{}" else "chat/completions"
    return check_reply(await raw(gateway, head(len(body), path=path) + body), 404)


async def odd_query(gateway: ChaosGateway, rng: random.Random) -> Ending:
    query = rng.choice(["limit=%C2%B2", "limit=9" + "9" * 400, "after=%00", "limit=-1", "%ff=%ff", "limit=1e9"])
    lines = f"host: x\r\nauthorization: Bearer {key(TENANT)}\r\nconnection: close"
    received = await raw(gateway, f"GET /v1/files?{query} HTTP/1.1\r\n{lines}\r\n\r\n".encode())
    return check_reply(received, 200, 400, 404)


async def long_prompt(gateway: ChaosGateway, rng: random.Random) -> Ending:
    """A prompt that is longer than the model's context. It is quarantined if an engine was killed twice meanwhile."""
    body = chat(rng, messages=[{"role": "user", "content": "word " * 20_000}])
    return check_reply(await exchange(gateway.port, Call("long", "chat/completions", body, TENANT)), 400, 422)


async def above_rate(gateway: ChaosGateway, rng: random.Random) -> Ending:
    return check_reply(await exchange(gateway.port, Call("rate", "chat/completions", chat(rng), "narrow")), 200, 429)


async def without_money(gateway: ChaosGateway, rng: random.Random) -> Ending:
    return check_reply(await exchange(gateway.port, Call("poor", "chat/completions", chat(rng), "poor")), 200, 429)


VISITS: dict[str, Visit] = {
    "leaves midway": leave_midway, "bad body": bad_body, "no JSON": no_json, "bad grammar": bad_grammar,
    "giant body": giant_body, "bad HTTP": bad_http, "slow head": slow_head, "slow reader": slow_reader,
    "wrong key": wrong_key, "upgrade": upgrade, "unknown path or model": unknown, "odd query": odd_query,
    "prompt too long": long_prompt, "above its rate": above_rate, "without money": without_money,
}  # fmt: skip


async def visit(gateways: Gateways, kind: str, rng: random.Random) -> Ending:
    """One visit of a hostile client."""
    gateway, began = gateways.choose(rng), time.monotonic()
    try:
        return await VISITS[kind](gateway, rng)
    except TimeoutError:
        return Ending("no answer", fault=f"{kind}: no answer in {VISIT_SECONDS:.0f} s")
    except OSError:  # a hostile client may be cut off at any time
        return Ending("closed")
    except ValueError:
        killed = gateway.was_dead(since=began)
        return Ending("gateway killed" if killed else "closed without a reply")
