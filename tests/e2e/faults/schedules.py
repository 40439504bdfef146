"""Random schedules of failures: each deployment answers each request in a random way.

Whatever is drawn: what a client gets is the beginning of the right answer, its end says truly whether it is all of
it, there is one receipt for it, and the receipt's tokens are those that it got.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.e2e.faults.test_scenarios import ClientResult, error_with_200, send_request
from tests.e2e.faults.upstreams import TOKENS, Behaviour, Request, listening
from tests.e2e.processes import Gateway, gateway, tenant
from tests.gateway.providers.scripted_server import STREAM_END, STREAM_HEAD, chunked, json_response

AT_ONCE = 50
INTER_TOKEN_SECONDS = 0.5
WHOLE = "".join(f"{token} " for token in range(TOKENS))
DEPLOYMENTS = ("first", "second", "third")
ERRORS = {
    "upstream_cut", "upstream_error", "upstream_timeout", "upstream_busy", "overloaded", "context_length_exceeded",
}  # fmt: skip
PAGE = b"HTTP/1.1 200 OK\r\ncontent-type: text/html\r\ncontent-length: 13\r\n\r\n<html></html>"
ELSEWHERE = b"HTTP/1.1 302 Found\r\nlocation: http://elsewhere.invalid/\r\ncontent-length: 0\r\n\r\n"

# The weights with which they are drawn. Slow ones are rare.
KINDS = {
    "good": 30, "in pieces": 10, "more behind the end": 3,
    # Before the first useful chunk.
    "500": 5, "503": 5, "429": 3, "busy for long": 1, "reset": 5, "400": 2, "late": 1, "page": 2, "elsewhere": 1,
    "no http": 1, "half a head": 2, "error with 200": 3,
    # In the middle of a stream or of a JSON answer.
    "cut": 8, "stall": 1, "malformed": 4, "no done": 6, "error": 4, "half an event": 4, "no chunk": 3,
}  # fmt: skip


def random_behaviour(seed: str) -> Behaviour:
    """A deployment that behaves randomly."""
    chance = random.Random(seed)

    async def behave(request: Request) -> None:
        kind = chance.choices(list(KINDS), list(KINDS.values()))[0]
        at = chance.randrange(TOKENS)
        match kind:
            case "good":
                await request.whole()
            case "in pieces":
                request.piece_bytes = chance.randrange(20, 500)
                await request.whole()
            case "more behind the end":
                await request.whole()
                await request.write(b"data: more\n\n")
                request.reset()
            case "500":
                await request.refuse("500 Internal Server Error")
            case "503":
                await request.refuse("503 Service Unavailable")
            case "429":
                await request.refuse("429 Too Many Requests", "retry-after-ms: 20")
            case "busy for long":
                await request.refuse("429 Too Many Requests", "retry-after-ms: 300")
            case "error with 200":
                await error_with_200(request)
            case "reset":
                request.reset()
            case "400":
                await request.refuse("400 Bad Request", code="context_length_exceeded")
            case "late":
                await asyncio.sleep(3 * INTER_TOKEN_SECONDS)
                await request.whole()
            case "page":
                await request.write(PAGE)
            case "elsewhere":
                await request.write(ELSEWHERE)
            case "no http":
                await request.write(b"no\x00http\r\n\r\n")
                request.reset()
            case "half a head":
                await request.write(STREAM_HEAD[: at + 10])
                request.reset()
            case _ if request.streams:
                await broken_stream(request, kind, at)
            case _:
                await broken_answer(request, kind, at)

    return behave


async def broken_stream(request: Request, kind: str, at: int) -> None:
    await request.head()
    await request.tokens(0, at)
    match kind:
        case "cut":
            request.reset()
        case "stall":
            await asyncio.sleep(3 * INTER_TOKEN_SECONDS)
        case "malformed":
            await request.write(chunked(b'data: {"choices":[{"delta\n\n'))
            await request.tokens(at, TOKENS)
            await request.finish()
        case "no done":
            await request.write(STREAM_END)
        case "error":
            await request.write(chunked(b'data: {"error": {"message": "x"}}\n\n'))
        case "half an event":
            await request.write(chunked(b'data: {"id": "chatcmpl", "choices": [{"index": 0, "delta": {"content": "x'))
            request.reset()
        case "no chunk":
            await request.write(b"zz\r\nthis has no length\r\n")
        case _:
            raise AssertionError(kind)


async def broken_answer(request: Request, kind: str, at: int) -> None:
    whole = json.dumps({"choices": [{"index": 0, "message": {"role": "assistant", "content": WHOLE}}]}).encode()
    match kind:
        case "malformed" | "no chunk":
            await request.write(json_response(whole[: at + 1]))
        case "error":
            await request.write(json_response(b'{"error": {"message": "x"}}'))
        case "stall":
            await request.write(json_response(whole)[: -at - 1])
            await asyncio.sleep(3 * INTER_TOKEN_SECONDS)
            request.reset()
        case _:
            await request.write(json_response(whole)[: -at - 1])
            request.reset()


@contextmanager
def gateway_with_faulty_deployments(folder: Path, seed: int = 0) -> Iterator[Gateway]:
    with listening({name: random_behaviour(f"{name} {seed}") for name in DEPLOYMENTS}) as upstreams:
        policy = {
            "deployments": [
                {"name": name, "base_url": f"http://127.0.0.1:{port}/v1", "model": "m", "max_concurrency": AT_ONCE}
                for name, port in upstreams.ports.items()
            ],
            "models": [{"name": "m", "deployments": list(DEPLOYMENTS)}],
            "classes": {
                "realtime": {
                    "ttft": "5s", "inter_token": f"{INTER_TOKEN_SECONDS}s", "total": "20s", "retries": 1.0,
                    "hedge": {"after": "300ms", "budget": 1.0},
                }
            },
            "cache": {"scope": "off"},
            "tenants": [tenant("dev")],
        }  # fmt: skip
        with gateway(folder, policy) as started:
            yield started


async def send_requests(front: Gateway, calls: int) -> list[ClientResult]:
    """Send `calls` requests, a quarter of them without streaming."""
    answers: list[ClientResult] = []
    slots = asyncio.Semaphore(AT_ONCE)

    async def one(number: int) -> None:
        async with slots:
            answers.append(await send_request(front, "m", stream=number % 4 > 0))

    await asyncio.gather(*(one(number) for number in range(calls)))
    return answers


def check_all(front: Gateway, answers: list[ClientResult]) -> Counter[str]:
    """Count the results by kind. Raises `AssertionError` if anything reported was not true."""
    ends = Counter(check_answer(seen) for seen in answers)
    rows: list[dict[str, Any]] = front.receipts()
    receipts = {row["call_id"]: row for row in rows}
    assert len(receipts) == len(rows)
    for seen in answers:
        receipt = receipts.get(seen.headers["x-request-id"])
        if receipt is None:  # no deployment was tried
            assert seen.status == 503
            continue
        tokens = len(seen.text.split())
        assert (receipt["outcome"] == "complete") == seen.done, (receipt, seen)
        # An answer that no deployment counted to its end is estimated from its bytes.
        close = receipt["exact"] is False and receipt["output"] <= 2 * tokens + 1
        assert receipt["output"] == tokens or close, (receipt, seen)
    assert front.metric("warmpath_inflight") == 0
    assert front.metric("warmpath_deployment_inflight") == 0
    return ends


def check_answer(seen: ClientResult) -> str:
    """Check one client's result, and return its kind."""
    assert WHOLE.startswith(seen.text), seen
    if seen.done:
        assert (seen.status, seen.text, seen.error, seen.finish) == (200, WHOLE, None, "stop"), seen
        return "complete"
    assert seen.error is not None, seen
    if seen.error.get("code") in (None, "error"):  # the words of a deployment that rejected the request
        assert seen.status >= 400 and seen.text == "", seen
        return "rejected"
    assert seen.error["code"] in ERRORS, seen
    if seen.status != 200:
        assert seen.text == ""
        return str(seen.error["code"])
    assert seen.error["code"] == "upstream_cut"
    return "upstream_cut"
