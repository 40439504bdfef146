"""The innocent calls: what they send, how a reply is read, and what ending is allowed.

A call is one request on a connection of its own, so what happens to it happens to no other call.
"""

from __future__ import annotations

import asyncio
import base64
import json
import random
import struct
import time
import zlib
from dataclasses import dataclass, field
from typing import Any

from benchmarks.chaos.faults import Gateways
from tests.e2e.processes import DEMO, key

REPLY_SECONDS = 600.0  # no innocent call may take longer, on a machine that is busy with other work
PAUSE_SECONDS = 0.3  # before the next request of a call
TENANTS = ("acme", "beta", "gamma", "free")
# The share of each way to call. Media go to scripted servers, since the bundled engine reads text only.
WEIGHTS = {
    "chat": 30, "completions": 8, "responses": 10, "messages": 10, "embeddings": 8, "cached": 4, "image": 6,
    "batch class": 4, "unreliable": 22,
}  # fmt: skip


@dataclass(frozen=True)
class Call:
    kind: str
    path: str
    body: dict[str, Any]
    tenant: str
    headers: dict[str, str] = field(default_factory=dict)

    def head(self, length: int) -> bytes:
        lines = {"host": "x", "authorization": f"Bearer {key(self.tenant)}", "connection": "close", **self.headers}
        lines |= {"content-type": "application/json", "content-length": str(length)}
        text = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        return f"POST /v1/{self.path} HTTP/1.1\r\n{text}\r\n".encode()


@dataclass(frozen=True)
class Ending:
    """How one call ended. `cause` is the error's code, or its type; `fault` says why this ending is not allowed."""

    what: str
    cause: str = ""
    fault: str = ""
    call_id: str = ""


@dataclass(frozen=True)
class Reply:
    status: int
    headers: dict[str, str]
    content: bytes
    whole: bool  # whether the body arrived to its end

    @property
    def error(self) -> dict[str, Any] | None:
        """The error object of a refusal, or of the last event of a stream."""
        if self.headers.get("content-type", "").startswith("text/event-stream"):
            for line in reversed(self.content.split(b"\n")):
                if line.startswith(b"data: {") and (b'"error"' in line or b"response.failed" in line):
                    return _error_in(json.loads(line[6:]))
            return None
        return _error_in(_json(self.content)) if self.status != 200 else None


def _json(content: bytes) -> Any:
    try:
        return json.loads(content)
    except ValueError:
        return None


def _error_in(value: Any) -> dict[str, Any] | None:
    """The error object, as OpenAI, Anthropic and the Responses API write it."""
    if not isinstance(value, dict):
        return None
    inner = value.get("error") or (value.get("response") or {}).get("error")
    return inner if isinstance(inner, dict) else None


def cause_of(error: dict[str, Any] | None) -> str:
    """The name of the error's cause, or nothing if it names none."""
    if not error or not error.get("message"):
        return ""
    details = error.get("details") or {}  # where the Messages API has a code
    return str(error.get("code") or details.get("error_code") or error.get("type") or "")


def parse(received: bytes) -> Reply:
    """Read a raw reply. Raises `ValueError` if it has no complete head."""
    head, end, body = received.partition(b"\r\n\r\n")
    if not end:
        raise ValueError("no complete head")
    first, *lines = head.decode("latin-1").split("\r\n")
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
    whole = len(body) >= int(headers.get("content-length", 0))
    if headers.get("transfer-encoding") == "chunked":
        body, whole = _unchunked(body)
    return Reply(int(first.split(" ")[1]), headers, body, whole)


def _unchunked(body: bytes) -> tuple[bytes, bool]:
    parts, at = list[bytes](), 0
    while (end := body.find(b"\r\n", at)) >= 0:
        size = int(body[at:end], 16)
        if size == 0:
            return b"".join(parts), True
        parts.append(body[end + 2 : end + 2 + size])
        at = end + 2 + size + 2
    return b"".join(parts), False


# What marks the end of a whole stream, by path.
STREAM_ENDS = {
    "chat/completions": (b"data: [DONE]",),
    "completions": (b"data: [DONE]",),
    "responses": (b'"type":"response.completed"', b'"type":"response.incomplete"'),
    "messages": (b"event: message_stop",),
}


def is_answered(call: Call, reply: Reply) -> bool:
    """Whether the reply is a whole answer."""
    if reply.status != 200 or not reply.whole:
        return False
    if call.body.get("stream"):
        return any(mark in reply.content for mark in STREAM_ENDS[call.path])
    return isinstance(_json(reply.content), dict)


async def exchange(port: int, call: Call, seconds: float = REPLY_SECONDS) -> bytes:
    """Send the call and read to the end of the connection. Raises `OSError` or `TimeoutError`."""
    content = json.dumps(call.body).encode()
    writer: asyncio.StreamWriter | None = None
    try:
        async with asyncio.timeout(seconds):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(call.head(len(content)) + content)
            received = bytearray()
            while data := await reader.read(65536):
                received += data
            return bytes(received)
    finally:
        if writer is not None:
            writer.transport.abort()


async def ask(gateways: Gateways, call: Call, rng: random.Random) -> Ending:
    """Make an innocent call as a client behind a load balancer, and judge how it ends."""
    deadline = time.monotonic() + REPLY_SECONDS
    refused_by_full_disk = 0
    while time.monotonic() < deadline:
        gateway = gateways.choose(rng)
        began = time.monotonic()
        try:
            reply = parse(await exchange(gateway.port, call, deadline - began))
        except TimeoutError:
            break
        except (OSError, ValueError):  # refused, reset, or closed before the head was complete
            if not gateway.was_dead(since=began):
                return Ending("lost", fault="the connection broke, and the gateway was not killed")
            await asyncio.sleep(PAUSE_SECONDS)
            return Ending("gateway killed")
        ending = judge(call, reply, killed=gateway.was_dead(since=began))
        if ending.cause == "ledger_unavailable" and gateway.had_full_disk(since=began):
            refused_by_full_disk += 1
            await asyncio.sleep(PAUSE_SECONDS)
            continue
        if refused_by_full_disk and ending.what == "answered":
            return Ending("answered by the other gateway (full disk)", call_id=ending.call_id)
        return ending
    return Ending("no answer in time", fault=f"no answer in {REPLY_SECONDS:.0f} s")


def judge(call: Call, reply: Reply, *, killed: bool) -> Ending:
    call_id = reply.headers.get("x-request-id", "")
    if is_answered(call, reply):
        return Ending("answered", call_id=call_id)
    error = reply.error
    cause = cause_of(error)
    if reply.status != 200:
        words = f"{reply.status} {cause}: {reply.content[:300]!r}"
        return Ending("refused", cause, words, call_id)
    if error is not None:
        fault = "" if cause else f"a stream ended with an error that names no cause: {reply.content[-300:]!r}"
        return Ending("stream cut with an error", cause, fault, call_id)
    if killed:
        return Ending("gateway killed")
    return Ending("lost", "", f"the reply broke off without an error: {reply.content[-300:]!r}", call_id)


# What is sent


def draw(rng: random.Random, number: int, unreliable: list[str]) -> Call:
    """A random innocent call. `unreliable` are the models behind servers that misbehave."""
    kind = rng.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
    tenant = rng.choice(TENANTS)
    stream = rng.random() < 0.6
    tokens = rng.randint(1, 12)
    text = f"{rng.choice(_TOPICS)} Question {number}. " + "Think about it. " * rng.randrange(12)
    turns = [{"role": "system", "content": _SYSTEMS[number % len(_SYSTEMS)]}, {"role": "user", "content": text}]
    options: dict[str, Any] = {"ignore_eos": True} if rng.random() < 0.3 else {}
    match kind:
        case "completions":
            return Call(kind, kind, {"model": DEMO, "prompt": text, "max_tokens": tokens, "stream": stream}, tenant)
        case "responses":
            body = {"model": DEMO, "input": text, "max_output_tokens": 16 + tokens, "stream": stream}
            return Call(kind, kind, body, tenant)
        case "messages":
            body = {"model": DEMO, "messages": turns[1:], "max_tokens": tokens, "stream": stream}
            return Call(kind, kind, body, tenant)
        case "embeddings":
            body = {"model": DEMO, "input": [text, "and this"] if number % 2 else text}
            return Call(kind, kind, body, tenant)
        case "cached":
            turns = [{"role": "user", "content": f"A question that many ask: {number % 5}"}]
            body = {"model": DEMO, "messages": turns, "max_tokens": 8, "temperature": 0, "stream": stream}
            return Call(kind, "chat/completions", body, tenant)
        case "image":
            parts = [{"type": "text", "text": text}, {"type": "image_url", "image_url": {"url": image(rng)}}]
            body = {"model": "seeing", "messages": [{"role": "user", "content": parts}], "max_tokens": 100}
            return Call(kind, "chat/completions", {**body, "stream": stream}, tenant)
        case "unreliable":
            return _to_unreliable(rng.choice(unreliable), rng, text, stream, tenant)
        case _:
            body = {"model": DEMO, "messages": turns, "max_tokens": tokens, "stream": stream, **options}
            if stream and rng.random() < 0.5:
                body["stream_options"] = {"include_usage": True}
            headers = {"x-class": "batch"} if kind == "batch class" else {}
            return Call(kind, "chat/completions", body, tenant, headers)


def _to_unreliable(model: str, rng: random.Random, text: str, stream: bool, tenant: str) -> Call:
    path = rng.choice(["chat/completions"] * 3 + ["messages", "responses"])
    limit = "max_output_tokens" if path == "responses" else "max_tokens"
    prompt = {"input": text} if path == "responses" else {"messages": [{"role": "user", "content": text}]}
    return Call(f"unreliable {model}", path, {"model": model, **prompt, limit: 100, "stream": stream}, tenant)


def image(rng: random.Random) -> str:
    """A grey PNG of a random size, as a data URL."""
    width, height = rng.randint(1, 800), rng.randint(1, 800)
    rows = b"".join(b"\0" + bytes([rng.randrange(256)]) * width for _ in range(height))
    data = b"\x89PNG\r\n\x1a\n"
    head = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    for name, content in ((b"IHDR", head), (b"IDAT", zlib.compress(rows)), (b"IEND", b"")):
        data += struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))
    return "data:image/png;base64," + base64.b64encode(data).decode()


_TOPICS = ("What is prefix caching?", "Why is the sky blue?", "Count to ten.", "Ünïcödé: 你好, 🙂.", "Say nothing new.")
_SYSTEMS = tuple(
    f"You are assistant {number} of a long and careful instruction. " + "Be brief, be kind, and count well. " * number
    for number in range(1, 9)
)
