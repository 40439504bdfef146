"""Cut streams that are resumed on another deployment: over real sockets, and with killed engines."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.e2e.faults.test_scenarios import CUT_AT, CUT_TOKENS, WHOLE, cut, malformed, no_done, send_request, stall
from tests.e2e.faults.upstreams import PROMPT_TOKENS, TOKENS, Behaviour, Request, Upstreams, listening
from tests.e2e.processes import (
    DEMO,
    PATIENCE_SECONDS,
    PRICE,
    Gateway,
    chat,
    deployment,
    engine,
    gateway,
    key,
    simple_policy,
    tenant,
)
from tests.gateway.providers.scripted_server import STREAM_END, chunked

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


async def continue_answer(request: Request) -> None:
    """Continue the answer that the last message begins, as an engine does, in pieces of other sizes."""
    said = text_so_far(request)
    await request.head()
    await pieces_from(request, len(said), len(WHOLE))
    await finish(request, said)


def text_so_far(request: Request) -> str:
    last = request.body["messages"][-1]
    said: str = last["content"] if last["role"] == "assistant" else ""
    assert (request.body.get("continue_final_message") is True) == bool(said)
    assert WHOLE.startswith(said)
    return said


async def pieces_from(request: Request, start: int, end: int) -> None:
    for at in range(start, end, 7):
        piece = WHOLE[at : min(at + 7, end)]
        await request.frame({"delta": {"content": piece}, "index": 0, "finish_reason": None})


async def finish(request: Request, said: str) -> None:
    await request.frame({"delta": {}, "index": 0, "finish_reason": "stop"})
    known = len(said.split())
    counts = {"prompt_tokens": PROMPT_TOKENS + known, "completion_tokens": TOKENS - known}
    await request.frame(None, usage=counts | {"total_tokens": PROMPT_TOKENS + TOKENS})
    await request.write(chunked(b"data: [DONE]\n\n") + STREAM_END)


async def error_event(request: Request) -> None:
    await request.head()
    await request.tokens(0, CUT_AT)
    await send_error_event(request)


async def send_error_event(request: Request) -> None:
    await request.write(chunked(b'data: {"error": {"message": "x"}}\n\n'))


BREAKS: dict[str, Behaviour] = {
    "cut": cut, "stall": stall, "malformed": malformed, "no-done": no_done, "error": error_event,
}  # fmt: skip


def random_cuts(seed: int) -> Behaviour:
    """A deployment that cuts every other response, at a random place and in a random way."""
    chance = random.Random(seed)

    async def behave(request: Request) -> None:
        said = text_so_far(request)
        kind = chance.choice([*["good"] * 6, "500", "reset", "cut", "cut", "malformed", "no done", "error"])
        at = chance.randint(len(said), len(WHOLE))
        if kind == "good":
            await continue_answer(request)
        elif kind == "500":
            await request.refuse("500 Internal Server Error")
        else:
            if kind != "reset":
                await request.head()
                await pieces_from(request, len(said), at)
            await ENDS[kind](request)

    return behave


async def reset_connection(request: Request) -> None:
    request.reset()


async def broken_event(request: Request) -> None:
    await request.write(chunked(b'data: {"choices":[{"delta":\n\n'))
    await pieces_from(request, 0, len(WHOLE))


async def end_of_body(request: Request) -> None:
    await request.write(STREAM_END)


ENDS: dict[str, Behaviour] = {
    "reset": reset_connection, "cut": reset_connection, "malformed": broken_event, "no done": end_of_body,
    "error": send_error_event,
}  # fmt: skip
RANDOM_DEPLOYMENTS = ("chance-0", "chance-1", "chance-2")


@pytest.fixture(scope="module")
def upstreams() -> Iterator[Upstreams]:
    servers = {
        f"{name}-{place}": b for name, broken in BREAKS.items() for place, b in enumerate((broken, continue_answer))
    }
    random_deployments = {name: random_cuts(seed) for seed, name in enumerate(RANDOM_DEPLOYMENTS)}
    with listening({**servers, **random_deployments, "both-0": cut, "both-1": cut}) as started:
        yield started


@pytest.fixture(scope="module")
def faulty(upstreams: Upstreams, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    policy = {
        "deployments": [
            {
                "name": name, "provider": "vllm", "base_url": f"http://127.0.0.1:{port}/v1", "model": "m",
                "price": PRICE, "prefill_tokens_per_second": 1_000_000 if name.endswith("-0") else 1_000,
            }
            for name, port in upstreams.ports.items()
        ],
        "models": [
            *({"name": name, "deployments": [f"{name}-0", f"{name}-1"]} for name in (*BREAKS, "both")),
            {"name": "chance", "deployments": list(RANDOM_DEPLOYMENTS)},
        ],
        "classes": {"realtime": {"inter_token": "1s", "continue_cut_streams": True, "retries": 1.0}},
        "cache": {"scope": "off"},
        "tenants": [tenant("dev")],
    }  # fmt: skip
    with gateway(tmp_path_factory.mktemp("continued"), policy) as started:
        yield started


@pytest.mark.parametrize("name", BREAKS)
async def test_the_client_gets_the_whole_answer_once(faulty: Gateway, upstreams: Upstreams, name: str) -> None:
    seen = await send_request(faulty, name)
    assert (seen.status, seen.text, seen.finish, seen.error, seen.done) == (200, WHOLE, "stop", None, True)
    receipt = faulty.receipt(seen.headers["x-request-id"])
    assert [(a["deployment"], a.get("continues", False)) for a in receipt["attempts"]] == [
        (f"{name}-0", False), (f"{name}-1", True),
    ]  # fmt: skip
    # The second deployment counts the received text as prompt. The gateway knows only that text's estimate.
    counted = PROMPT_TOKENS + CUT_AT - CUT_TOKENS, TOKENS - CUT_AT + CUT_TOKENS
    assert (receipt["outcome"], receipt["input_uncached"], receipt["output"]) == ("complete", *counted)
    assert upstreams.request_count(f"{name}-1") == 1


async def test_random_cuts_lose_and_repeat_nothing(faulty: Gateway) -> None:
    slots, ends = asyncio.Semaphore(20), Counter[str]()

    async def one() -> None:
        async with slots:
            seen = await send_request(faulty, "chance")
        assert WHOLE.startswith(seen.text)
        assert seen.done == (seen.text == WHOLE and seen.error is None)
        if seen.status != 200:
            ends["refused"] += 1
            return
        receipt = faulty.receipt(seen.headers["x-request-id"])
        was_resumed = any(each.get("continues") for each in receipt["attempts"])
        ends["resumed" if seen.done and was_resumed else "whole" if seen.done else "cut"] += 1
        assert (receipt["outcome"] == "complete") == seen.done
        if seen.done:
            assert receipt["input_uncached"] + receipt["output"] == PROMPT_TOKENS + TOKENS

    await asyncio.gather(*(one() for _ in range(120)))
    assert min(ends["resumed"], ends["whole"], ends["cut"]) > 0, ends
    assert faulty.metric("warmpath_cut_streams_total", result="continued") >= ends["resumed"]
    assert faulty.metric("warmpath_deployment_inflight") == 0


async def test_a_second_cut_is_reported(faulty: Gateway) -> None:
    seen = await send_request(faulty, "both")
    assert seen.error is not None and seen.error["code"] == "upstream_cut" and not seen.done
    assert faulty.receipt(seen.headers["x-request-id"])["outcome"] == "upstream_cut"


async def test_openais_client_sees_one_answer(faulty: Gateway) -> None:
    async with (
        faulty.async_client() as client,
        client.chat.completions.stream(
            model="cut", messages=[{"role": "user", "content": "Count."}], stream_options={"include_usage": True}
        ) as stream,
    ):
        whole = await stream.get_final_completion()
    (choice,) = whole.choices
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", WHOLE, "stop")
    assert whole.usage is not None
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (
        PROMPT_TOKENS + CUT_AT - CUT_TOKENS, TOKENS - CUT_AT + CUT_TOKENS,
    )  # fmt: skip


async def test_a_killed_engine_costs_no_token(tmp_path: Path) -> None:
    """kill -9 in the middle of an answer at temperature 0: the client gets what an engine that lives would say."""
    # In float32, an answer takes longer, so it is not complete when the engine is killed.
    with engine(tmp_path / "a", "--dtype", "float32") as a, engine(tmp_path / "b", "--dtype", "float32") as b:
        engines = {"a": a, "b": b}
        policy = simple_policy(
            a.url,
            deployments=[deployment(name, each.url, continuous_usage=True) for name, each in engines.items()],
            models=[{"name": DEMO, "deployments": list(engines), "continue_cut_streams": True}],
            cache={"scope": "off"},
        )
        body = chat("Tell me about prefix caching.", temperature=0, stream=True)
        with gateway(tmp_path / "gateway", policy) as front:
            whole, whole_id = await read(front, body, lambda pieces, name: None)
            killed: list[str] = []

            def kill(pieces: int, name: str) -> None:
                if pieces == 2:
                    killed.append(name)
                    engines[name].kill()

            text, call_id = await read(front, body, kill)
            assert text == whole
            uncut, receipt = front.receipt(whole_id), front.receipt(call_id)
            (first,) = killed
            (second,) = engines.keys() - killed
            assert [(each["deployment"], each["outcome"]) for each in receipt["attempts"]] == [
                (first, "cut"), (second, "ok"),
            ]  # fmt: skip
            assert (receipt["outcome"], receipt["exact"], receipt["output"]) == ("complete", True, uncut["output"])
            prompt, uncut_prompt = (row["input_uncached"] + row["cache_read"] for row in (receipt, uncut))
            assert prompt == uncut_prompt


async def read(front: Gateway, body: dict[str, Any], look: Callable[[int, str], None]) -> tuple[str, str]:
    """The text of a stream, and its call's id. `look` is called with each piece."""
    text, count, done = "", 0, False
    async with (
        httpx2.AsyncClient(timeout=PATIENCE_SECONDS) as client,
        client.stream(
            "POST", f"{front.url}/v1/chat/completions", json=body, headers={"authorization": f"Bearer {key('dev')}"}
        ) as reply,
    ):
        assert reply.status_code == 200
        async for line in reply.aiter_lines():
            done = done or line == "data: [DONE]"
            if line.startswith("data: {"):
                event = json.loads(line[6:])
                assert "error" not in event, event
                for choice in event["choices"]:
                    piece = choice["delta"].get("content") or ""
                    text, count = text + piece, count + bool(piece)
                    look(count, reply.headers["x-warmpath-deployment"])
    assert done
    return text, reply.headers["x-request-id"]
