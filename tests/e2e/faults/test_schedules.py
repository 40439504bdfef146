"""Random schedules of failures: two servers, of which each answers every request in a way drawn by chance.

Whatever is drawn: what a client gets is the beginning of the right answer, its end says truly whether it is all of
it, there is one receipt for it, and the receipt's tokens are those that it got.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Iterator

import pytest

from tests.e2e.faults.test_scenarios import Seen, ask
from tests.e2e.faults.upstreams import TOKENS, Request, Upstreams, listening
from tests.e2e.processes import Gateway, gateway, tenant
from tests.gateway.providers.scripted import coded

pytestmark = pytest.mark.e2e

CALLS = 500
AT_ONCE = 50
INTER_TOKEN_SECONDS = 0.5
WHOLE = "".join(f"{token} " for token in range(TOKENS))
SERVERS = ("first", "second", "third")
ERRORS = {
    "upstream_cut", "upstream_error", "upstream_timeout", "upstream_busy", "overloaded", "context_length_exceeded",
}  # fmt: skip


def behaving(seed: int):  # type: ignore[no-untyped-def]
    """A server that draws what it does. Kinds that take long are drawn seldom."""
    chance = random.Random(seed)

    async def behave(request: Request) -> None:
        kind = chance.choices(
            ["good", "500", "503", "429", "reset", "400", "late", "cut", "stall", "malformed", "no done", "error"],
            [40, 5, 5, 3, 5, 2, 1, 8, 1, 6, 6, 6],
        )[0]
        at = chance.randrange(TOKENS)
        match kind:
            case "500":
                await request.refuse("500 Internal Server Error")
            case "503":
                await request.refuse("503 Service Unavailable")
            case "429":
                await request.refuse("429 Too Many Requests", "retry-after-ms: 20")
            case "reset":
                request.reset()
            case "400":
                await request.refuse("400 Bad Request", code="context_length_exceeded")
            case "late":
                await asyncio.sleep(3 * INTER_TOKEN_SECONDS)
                await request.whole()
            case "good":
                await request.whole()
            case _ if not request.streams:
                request.reset()
            case _:
                await broken_stream(request, kind, at)

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
            await request.write(b'1b\r\ndata: {"choices":[{"delta\n\n\r\n')
            await request.tokens(at, TOKENS)
            await request.finish()
        case "no done":
            await request.write(b"0\r\n\r\n")
        case "error":
            await request.write(coded(b'data: {"error": {"message": "x"}}\n\n'))


@pytest.fixture(scope="module")
def upstreams() -> Iterator[Upstreams]:
    with listening({name: behaving(seed) for seed, name in enumerate(SERVERS)}) as started:
        yield started


@pytest.fixture(scope="module")
def faulty(upstreams: Upstreams, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    policy = {
        "deployments": [
            {"name": name, "base_url": f"http://127.0.0.1:{port}/v1", "model": "m", "max_concurrency": AT_ONCE}
            for name, port in upstreams.ports.items()
        ],
        "models": [{"name": "m", "deployments": list(SERVERS)}],
        "classes": {
            "realtime": {
                "ttft": "5s", "inter_token": f"{INTER_TOKEN_SECONDS}s", "total": "20s", "retries": 1.0,
                "hedge": {"after": "300ms", "budget": 1.0},
            }
        },
        "cache": {"scope": "off"},
        "tenants": [tenant("dev")],
    }  # fmt: skip
    with gateway(tmp_path_factory.mktemp("schedules"), policy) as started:
        yield started


async def test_whatever_happens_the_client_is_told_the_truth(faulty: Gateway) -> None:
    answers: list[Seen] = []
    places = asyncio.Semaphore(AT_ONCE)

    async def one(number: int) -> None:
        async with places:
            answers.append(await ask(faulty, "m", stream=number % 4 > 0))

    async with asyncio.timeout(300):
        await asyncio.gather(*(one(number) for number in range(CALLS)))

    ends = Counter(check(seen) for seen in answers)
    assert ends["complete"] > CALLS / 3 and ends["upstream_cut"] > CALLS / 50, ends
    receipts = {row["call_id"]: row for row in faulty.receipts()}
    assert len(receipts) == len(faulty.receipts())
    for seen in answers:
        receipt = receipts.get(seen.headers["x-request-id"])
        if receipt is None:  # nobody was asked
            assert seen.status == 503
            continue
        tokens = len(seen.text.split())
        assert (receipt["outcome"] == "complete") == seen.done
        assert receipt["output"] == tokens or (receipt["exact"] is False and abs(receipt["output"] - tokens) <= 1)
    assert faulty.metric("warmpath_inflight") == 0
    assert faulty.metric("warmpath_deployment_inflight") == 0


def check(seen: Seen) -> str:
    """How it ended; whatever it was, it must be true."""
    assert WHOLE.startswith(seen.text)
    if seen.done:
        assert (seen.status, seen.text, seen.error, seen.finish) == (200, WHOLE, None, "stop")
        return "complete"
    assert seen.error is not None and seen.error["code"] in ERRORS, seen
    if seen.status != 200:
        assert seen.text == ""
        return str(seen.error["code"])
    assert seen.error["code"] == "upstream_cut"
    return "upstream_cut"
