"""The sixteen scenarios of the field's published failover bench, as a user meets them.

The policy is that of `policies/default.yaml`: its classes and its deployment, with the test's servers. Each model has
one more line: `fallbacks`, or `fallbacks_when` for the context. Each server plays the fault, and the fallback is a
server that works. Silences are as long as published, so the slow scenarios run at the same time, in one test.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.e2e.faults.test_resuming import continue_answer
from tests.e2e.faults.test_scenarios import (
    CUT_AT,
    CUT_TOKENS,
    WHOLE,
    broken,
    busy,
    cut,
    error_with_200,
    filtered,
    malformed,
    once,
    reset_connection,
    send_request,
    too_long,
    unavailable,
)
from tests.e2e.faults.upstreams import TOKENS, Behaviour, Request, Upstreams, listening
from tests.e2e.processes import PRICE, Gateway, gateway, tenant
from tests.gateway.providers.scripted_server import STREAM_END

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

DEFAULTS = Path(__file__).parents[3] / "policies/default.yaml"
LATE_SECONDS = 20.0
STALL_SECONDS = 30.0
PERIOD_SECONDS = 1.0  # of the flapping server


async def no_answer(request: Request) -> None:
    await asyncio.sleep(300)


async def late_first_token(request: Request) -> None:
    await request.head()
    await asyncio.sleep(LATE_SECONDS)
    await request.tokens(0, TOKENS)
    await request.finish()


async def stall(request: Request) -> None:
    await request.head()
    await request.tokens(0, CUT_AT)
    await asyncio.sleep(STALL_SECONDS)
    await request.tokens(CUT_AT, TOKENS)
    await request.finish()


async def stall_with_comments(request: Request) -> None:
    await request.head()
    await request.tokens(0, CUT_AT)
    for _ in range(300):
        await request.write(b"8\r\n: ping\n\n\r\n")
        await asyncio.sleep(1)


async def no_done(request: Request) -> None:
    """A complete answer with its usage, and a clean end, without the marker."""
    await request.head()
    await request.tokens(0, TOKENS)
    await request.frame({"delta": {}, "index": 0, "finish_reason": "stop"})
    await request.frame(None, usage={"prompt_tokens": 10, "completion_tokens": TOKENS, "total_tokens": 10 + TOKENS})
    await request.write(STREAM_END)


async def flapping(request: Request) -> None:
    down = int(time.monotonic() / PERIOD_SECONDS) % 2
    await (unavailable(request) if down else request.whole())


async def good(request: Request) -> None:
    """Answers, and continues an answer that another deployment began."""
    await continue_answer(request)


async def refuses_prefill(request: Request) -> None:
    if request.body["messages"][-1]["role"] == "assistant":
        await request.refuse("400 Bad Request", code="invalid_request_error")
    else:
        await request.whole()


SCENARIOS: dict[str, Behaviour] = {
    "429-once": once(busy),
    "429-for-ever": busy,
    "500-once": once(broken),
    "503": unavailable,
    "reset": reset_connection,
    "no-answer": no_answer,
    "late-first-token": late_first_token,
    "cut": cut,
    "stall": stall,
    "malformed": malformed,
    "no-done": no_done,
    "context-too-long": too_long,
    "content-filter": filtered,
    "cut-and-prefill-refused": cut,
    "flapping": flapping,
    "accounting": broken,
    # Beyond the published ones.
    "error-in-200": error_with_200,
    "stall-with-comments": stall_with_comments,
}
ALONE: dict[str, Behaviour] = {"alone-429-once": once(busy), "alone-500-once": once(broken), "alone-503": unavailable}


@pytest.fixture(scope="module")
def upstreams() -> Iterator[Upstreams]:
    with listening({**SCENARIOS, **ALONE, "good": good, "refusing": refuses_prefill}) as started:
        yield started


@pytest.fixture(scope="module")
def served(upstreams: Upstreams, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    defaults = yaml.safe_load(DEFAULTS.read_text())
    (local,) = defaults["deployments"]
    models: list[dict[str, Any]] = [{"name": name, "deployments": [name], "fallbacks": ["good"]} for name in SCENARIOS]
    for model in models:
        if model["name"] == "context-too-long":
            model["fallbacks_when"] = {"context": model.pop("fallbacks")}
        if model["name"] == "cut-and-prefill-refused":
            model["fallbacks"] = ["refusing"]
    policy = {
        **{section: defaults[section] for section in ("classes", "default_class", "routing")},
        "deployments": [
            {**local, "name": name, "provider": "vllm", "base_url": f"http://127.0.0.1:{port}/v1", "price": PRICE}
            for name, port in upstreams.ports.items()
        ],
        "models": [*models, *({"name": name, "deployments": [name]} for name in ("good", "refusing", *ALONE))],
        "tenants": [tenant("dev")],
    }
    with gateway(tmp_path_factory.mktemp("published"), policy) as started:
        yield started


def attempts_of(served: Gateway, call_id: str) -> list[tuple[str, str]]:
    return [(attempt["deployment"], attempt["outcome"]) for attempt in served.receipt(call_id)["attempts"]]


COMPLETE: dict[str, list[str]] = {  # the scenarios in which the client gets the whole answer, and the outcomes
    "429-once": ["status_429", "ok"],
    "429-for-ever": ["status_429", "ok"],
    "500-once": ["status_500", "ok"],
    "503": ["status_503", "ok"],
    "reset": ["cut", "ok"],
    "no-answer": ["silent", "ok"],
    "late-first-token": ["ok"],
    "cut": ["cut", "ok"],
    "stall": [],
    "malformed": ["malformed", "ok"],
    "no-done": ["ok"],
    "context-too-long": ["refused", "ok"],
    "accounting": ["status_500", "ok"],
    "error-in-200": ["status_502", "ok"],
    "stall-with-comments": ["timeout", "ok"],
}


@pytest.mark.slow(seconds=32)
async def test_the_client_gets_the_whole_answer_once(served: Gateway) -> None:
    """Thirteen of the sixteen, and two more. All begin at the same time, so this takes as long as the slowest."""

    async def one(name: str) -> str:
        seen = await send_request(served, name)
        receipt = served.receipt(seen.headers["x-request-id"])
        told = (seen.status, seen.text, seen.finish, seen.error, seen.done)
        if told != (200, WHOLE, "stop", None, True):
            return f"{name}: {told}"
        outcomes = [attempt["outcome"] for attempt in receipt["attempts"]]
        if COMPLETE[name] and outcomes != COMPLETE[name]:
            return f"{name}: {outcomes}"
        # Of an answer that was cut and resumed, the part before the cut is estimated.
        resumed = any(attempt.get("continues") for attempt in receipt["attempts"])
        output = TOKENS - CUT_AT + CUT_TOKENS if resumed else TOKENS
        if (receipt["outcome"], receipt["output"]) != ("complete", output):
            return f"{name}: {json.dumps(receipt)}"
        return ""

    failed = [problem for problem in await asyncio.gather(*map(one, COMPLETE)) if problem]
    assert not failed, "\n".join(failed)


async def test_a_filtered_answer_is_passed_on(served: Gateway) -> None:
    seen = await send_request(served, "content-filter")
    assert (seen.status, seen.finish, seen.done, seen.error) == (200, "content_filter", True, None)


async def test_a_cut_that_nobody_continues_is_reported(served: Gateway) -> None:
    """A safe failure: what the client has is the beginning of the answer, and it learns that the rest is missing."""
    seen = await send_request(served, "cut-and-prefill-refused")
    assert seen.error is not None and seen.error["code"] == "upstream_cut" and not seen.done
    assert seen.text == "".join(f"{token} " for token in range(CUT_AT))
    assert attempts_of(served, seen.headers["x-request-id"]) == [
        ("cut-and-prefill-refused", "cut"), ("refusing", "refused"),
    ]  # fmt: skip


async def test_a_flapping_server_costs_no_answer(served: Gateway) -> None:
    for _ in range(30):
        answers = await asyncio.gather(*(send_request(served, "flapping") for _ in range(4)))
        assert {(seen.status, seen.text, seen.done) for seen in answers} == {(200, WHOLE, True)}
        await asyncio.sleep(0.1)


@pytest.mark.parametrize("name", ["alone-429-once", "alone-500-once"])
async def test_the_only_server_is_tried_again_after_a_pause(served: Gateway, name: str) -> None:
    seen = await send_request(served, name)
    assert (seen.status, seen.text, seen.done) == (200, WHOLE, True)
    assert [outcome for _, outcome in attempts_of(served, seen.headers["x-request-id"])][1:] == ["ok"]


async def test_if_all_are_down_the_client_learns_it(served: Gateway) -> None:
    seen = await send_request(served, "alone-503")
    assert seen.status in (502, 503) and seen.error is not None and seen.headers["x-should-retry"] == "true"
    assert served.receipt(seen.headers["x-request-id"])["cost"] == "0"
