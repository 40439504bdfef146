"""The sixteen failures of the field's published failover bench and one more, each as real upstreams on real sockets.

What must hold in every one: the right content or a truthful error within the class's deadlines, exactly one receipt,
no token twice, and every attempt accounted for.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx2
import pytest

from gateway.deployments.token_rates import BYTES_PER_TOKEN
from tests.e2e.faults.upstreams import SILENCE_SECONDS, TOKENS, Behaviour, Request, Upstreams, listening
from tests.e2e.processes import PATIENCE_SECONDS, PRICE, Gateway, gateway, key, tenant
from tests.gateway.providers.scripted_server import STREAM_END, STREAM_HEAD, chunked, json_response

pytestmark = pytest.mark.e2e

CUT_AT = 40
DEADLINE_SECONDS = 12.0  # above every limit of the class, and far below the time of the silent deployments
WHOLE = "".join(f"{token} " for token in range(TOKENS))
CUT_TEXT = "".join(f"{token} " for token in range(CUT_AT))
CUT_TOKENS = math.ceil(len(CUT_TEXT) / BYTES_PER_TOKEN)  # estimated, since the deployment counts none of a cut stream


async def good(request: Request) -> None:
    await request.whole()


def once(failure: Behaviour) -> Behaviour:
    async def behave(request: Request) -> None:
        await (failure(request) if request.number == 0 else request.whole())

    return behave


async def busy(request: Request) -> None:
    await request.refuse("429 Too Many Requests", "retry-after: 1", code="rate_limit_exceeded")


async def broken(request: Request) -> None:
    await request.refuse("500 Internal Server Error")


async def unavailable(request: Request) -> None:
    await request.refuse("503 Service Unavailable")


async def error_with_200(request: Request) -> None:
    """An error instead of an answer, with status 200."""
    error = json.dumps({"error": {"message": "out of memory", "code": 502}}).encode()
    if request.streams:
        await request.write(STREAM_HEAD + chunked(b"data: %b\n\n" % error) + STREAM_END)
    else:
        await request.write(json_response(error))


async def reset_connection(request: Request) -> None:
    request.reset()


async def silent(request: Request) -> None:
    await request.stay_silent()


async def late(request: Request) -> None:
    await request.head()  # a role, then nothing
    await request.stay_silent()
    await request.tokens(0, TOKENS)


async def cut(request: Request) -> None:
    await request.head()
    await request.tokens(0, CUT_AT)
    request.reset()


async def stall(request: Request) -> None:
    await request.head()
    await request.tokens(0, CUT_AT)
    await request.stay_silent()


async def malformed(request: Request) -> None:
    await request.head()
    await request.tokens(0, CUT_AT)
    await request.write(b'1d\r\ndata: {"choices":[{"delta":\n\n\r\n')
    await request.tokens(CUT_AT, TOKENS)
    await request.finish()


async def no_done(request: Request) -> None:
    await request.head()
    await request.tokens(0, CUT_AT)
    await request.write(b"0\r\n\r\n")


async def too_long(request: Request) -> None:
    await request.refuse("400 Bad Request", code="context_length_exceeded")


async def filtered(request: Request) -> None:
    await request.whole(tokens=3, reason="content_filter")


async def flapping(request: Request) -> None:
    down = int(time.monotonic() * 5) % 2
    await (unavailable(request) if down else request.whole())


SCENARIOS: dict[str, list[Behaviour]] = {
    "s01-429-once": [once(busy)],
    "s02-429-for-ever": [busy, busy],
    "s03-500-once": [once(broken)],
    "s04-503": [unavailable, good],
    "s05-reset": [reset_connection, good],
    "s06-no-answer": [silent, good],
    "s07-late-first-token": [late, good],
    "s08-cut": [cut, good],
    "s09-stall": [stall, good],
    "s10-malformed-chunk": [malformed, good],
    "s11-no-done": [no_done, good],
    "s12-context-too-long": [too_long, good],
    "s13-content-filter": [filtered, good],
    "s14-cut-and-refused": [cut, too_long],
    "s15-flapping": [flapping, good],
    "s16-accounting": [broken, good],
    "s17-error-with-200": [error_with_200, good],
    # Again for calls that do not stream, because a deployment that has just failed is no longer tried first.
    "s01-429-once-json": [once(busy)],
    "s03-500-once-json": [once(broken)],
    "s04-503-json": [unavailable, good],
    "s05-reset-json": [reset_connection, good],
    "s06-no-answer-json": [silent, good],
    "s16-accounting-json": [broken, good],
    "s17-error-with-200-json": [error_with_200, good],
}


@pytest.fixture(scope="module")
def upstreams() -> Iterator[Upstreams]:
    behaviours = {f"{name}-{place}": b for name, servers in SCENARIOS.items() for place, b in enumerate(servers)}
    with listening(behaviours) as started:
        yield started


@pytest.fixture(scope="module")
def faulty(upstreams: Upstreams, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    policy = {
        "deployments": [
            {
                "name": name, "base_url": f"http://127.0.0.1:{port}/v1", "model": "m", "price": PRICE,
                # The first deployment of a scenario looks fastest, so it is tried first.
                "prefill_tokens_per_second": 1_000_000 if name.endswith("-0") else 1_000,
            }
            for name, port in upstreams.ports.items()
        ],
        "models": [
            {"name": name, "deployments": [f"{name}-{place}" for place in range(len(servers))]}
            for name, servers in SCENARIOS.items()
        ],
        "classes": {
            "realtime": {
                "ttft": "5s", "inter_token": "1s", "total": "10s", "retries": 1.0,
                "hedge": {"after": "500ms", "budget": 1.0},
            }
        },
        "cache": {"scope": "off"},
        "tenants": [tenant("dev")],
    }  # fmt: skip
    with gateway(tmp_path_factory.mktemp("faults"), policy) as started:
        yield started


@dataclass
class ClientResult:
    """What a client received."""

    status: int
    headers: httpx2.Headers
    text: str = ""
    finish: str | None = None
    error: dict[str, Any] | None = None
    done: bool = False
    seconds: float = 0.0
    ids: set[str] = field(default_factory=set)


async def send_request(served: Gateway, model: str, *, stream: bool = True) -> ClientResult:
    body = {"model": model, "messages": [{"role": "user", "content": "Count."}], "stream": stream}
    began = time.monotonic()
    async with (
        httpx2.AsyncClient(timeout=PATIENCE_SECONDS, verify=False) as client,
        client.stream(
            "POST", f"{served.url}/v1/chat/completions", json=body, headers={"authorization": f"Bearer {key('dev')}"}
        ) as reply,
    ):
        seen = ClientResult(reply.status_code, reply.headers)
        if not reply.headers["content-type"].startswith("text/event-stream"):
            answer = json.loads(await reply.aread())
            seen.error = answer.get("error")
            for choice in answer.get("choices", ()):
                seen.text, seen.finish, seen.done = choice["message"]["content"], choice["finish_reason"], True
        else:
            async for line in reply.aiter_lines():
                if line == "data: [DONE]":
                    seen.done = True
                elif line.startswith("data: "):
                    read_event(seen, json.loads(line[6:]))
    seen.seconds = time.monotonic() - began
    return seen


def read_event(seen: ClientResult, event: dict[str, Any]) -> None:
    assert not seen.done and seen.error is None, "nothing may follow the end"
    seen.error = event.get("error")
    for choice in event.get("choices", ()):
        seen.text += choice["delta"].get("content") or ""
        seen.finish = choice["finish_reason"] or seen.finish


def receipt_of(served: Gateway, seen: ClientResult) -> dict[str, Any]:
    """The call's only receipt."""
    return served.receipt(seen.headers["x-request-id"])


SAVED = {
    "s01-429-once": [("0", "status_429"), ("0", "ok")],
    "s03-500-once": [("0", "status_500"), ("0", "ok")],
    "s04-503": [("0", "status_503"), ("1", "ok")],
    "s05-reset": [("0", "cut"), ("1", "ok")],
    "s06-no-answer": [("0", "hedge_lost"), ("1", "ok")],
    "s07-late-first-token": [("0", "hedge_lost"), ("1", "ok")],
    "s16-accounting": [("0", "status_500"), ("1", "ok")],
    "s17-error-with-200": [("0", "status_502"), ("1", "ok")],
}


@pytest.mark.parametrize("model", [name for name in SCENARIOS if name.removesuffix("-json") in SAVED])
async def test_the_client_gets_the_right_answer(faulty: Gateway, model: str) -> None:
    attempts = SAVED[model.removesuffix("-json")]
    seen = await send_request(faulty, model, stream=not model.endswith("-json"))
    assert (seen.status, seen.text, seen.error, seen.done) == (200, WHOLE, None, True)
    assert seen.seconds < DEADLINE_SECONDS < SILENCE_SECONDS
    receipt = receipt_of(faulty, seen)
    assert [(a["deployment"][-1], a["outcome"]) for a in receipt["attempts"]] == attempts
    assert (receipt["outcome"], receipt["output"], receipt["exact"]) == ("complete", TOKENS, True)
    assert receipt["deployment"] == f"{model}-{attempts[-1][0]}"
    assert receipt["cost"] == "0.000025"  # (10 * 0.10 + 60 * 0.40) / 1M: billed once, for the one that worked


async def test_a_busy_fleet_is_reported_with_retry_after(faulty: Gateway) -> None:
    seen = await send_request(faulty, "s02-429-for-ever")
    assert seen.status == 503 and seen.error is not None and seen.error["code"] == "upstream_busy"
    assert int(seen.headers["retry-after"]) >= 1 and seen.headers["x-should-retry"] == "true"
    assert seen.seconds < DEADLINE_SECONDS
    receipt = receipt_of(faulty, seen)
    assert (receipt["outcome"], receipt["cost"]) == ("refused", "0")
    assert {a["outcome"] for a in receipt["attempts"]} == {"status_429"}


@pytest.mark.parametrize(
    ("model", "outcome", "attempt"),
    [
        ("s08-cut", "upstream_cut", "cut"),
        ("s09-stall", "timeout", "timeout"),
        ("s10-malformed-chunk", "upstream_cut", "malformed"),
        ("s11-no-done", "upstream_cut", "cut"),
        ("s14-cut-and-refused", "upstream_cut", "cut"),
    ],
)
async def test_a_broken_stream_is_never_a_clean_end(faulty: Gateway, model: str, outcome: str, attempt: str) -> None:
    seen = await send_request(faulty, model)
    assert seen.status == 200 and not seen.done and seen.finish is None
    assert seen.error is not None and seen.error["code"] == "upstream_cut"
    assert seen.text == CUT_TEXT
    assert seen.seconds < DEADLINE_SECONDS
    receipt = receipt_of(faulty, seen)
    assert (receipt["outcome"], receipt["exact"], receipt["output"]) == (outcome, False, CUT_TOKENS)
    assert [a["outcome"] for a in receipt["attempts"]] == [attempt]


async def test_a_wrong_request_is_sent_once(faulty: Gateway, upstreams: Upstreams) -> None:
    seen = await send_request(faulty, "s12-context-too-long")
    assert seen.status == 400 and seen.error is not None and seen.error["code"] == "context_length_exceeded"
    assert upstreams.request_count("s12-context-too-long-1") == 0
    assert receipt_of(faulty, seen)["outcome"] == "refused"


async def test_a_filtered_answer_is_complete(faulty: Gateway, upstreams: Upstreams) -> None:
    seen = await send_request(faulty, "s13-content-filter")
    assert (seen.status, seen.finish, seen.done, seen.text) == (200, "content_filter", True, "0 1 2 ")
    assert upstreams.request_count("s13-content-filter-1") == 0


async def test_a_flapping_deployment_costs_no_answer(faulty: Gateway, upstreams: Upstreams) -> None:
    for _ in range(12):
        answers = await asyncio.gather(*(send_request(faulty, "s15-flapping", stream=False) for _ in range(10)))
        assert {(seen.status, seen.text) for seen in answers} == {(200, WHOLE)}
        await asyncio.sleep(0.1)
    assert upstreams.request_count("s15-flapping-1") > 0
    assert len(faulty.receipts(model_asked="s15-flapping", outcome="complete")) == 120
