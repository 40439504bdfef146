"""Two engines behind the gateway, one with the role prefill and one with the role decode."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from gateway.routing.remote_prefill import LATE_MIN_SECONDS
from tests.e2e.processes import (
    DEMO,
    Gateway,
    Running,
    Wire,
    chat,
    deployment,
    engine,
    gateway,
    simple_policy,
    until,
)

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

BLOCK_TOKENS = 16
TTFT_SECONDS = 20.0
TRANSFERS = ("--kv-transfer", "--kv-transfer-peers", "127.0.0.1", "--kv-transfer-seconds", "2")


@dataclass(frozen=True)
class Stack:
    gateway: Gateway
    prefill: Running
    decode: Running

    def ask(self, prompt: str, **fields: Any) -> tuple[str, dict[str, Any]]:
        """An answer and its receipt."""
        reply = self.gateway.post("chat/completions", chat(prompt, max_tokens=8, temperature=0, **fields))
        body = reply.raise_for_status().json()
        return body["choices"][0]["message"]["content"], self.gateway.receipt(reply.headers["x-request-id"])

    def tokens(self, engine: Running) -> tuple[float, float]:
        return engine.metric("vllm:prompt_tokens_total"), engine.metric("vllm:generation_tokens_total")

    def cached(self, engine: Running) -> float:
        return engine.metric("vllm:prefix_cache_hits_total")


def start(folder: Path, stack: ExitStack) -> Stack:
    prefill, decode = (stack.enter_context(engine(folder / name, *TRANSFERS)) for name in ("p", "d"))
    policy = simple_policy(
        decode.url,
        deployments=[
            deployment("p", prefill.url, role="prefill"),
            deployment("d", decode.url, role="decode"),
            deployment("alone", prefill.url),
        ],
        models=[{"name": DEMO, "deployments": ["p", "d"]}, {"name": "alone", "deployments": ["alone"]}],
        routing={"remote_prefill_above": 1e-9, "log": True},
        classes={"realtime": {"ttft": TTFT_SECONDS}},
        cache={"scope": "off"},
    )
    return Stack(stack.enter_context(gateway(folder / "gateway", policy)), prefill, decode)


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with ExitStack() as processes:
        yield start(tmp_path_factory.mktemp("stack"), processes)


def long_prompt(seed: int) -> str:
    rng = random.Random(seed)
    return " ".join("".join(rng.choices("etaoinshrdlu", k=rng.randint(2, 9))) for _ in range(300))


def outcomes(receipt: dict[str, Any]) -> list[tuple[str, str]]:
    return [(attempt["deployment"], attempt["outcome"]) for attempt in receipt["attempts"]]


def test_one_engine_computes_the_prompt_and_the_other_one_answers(stack: Stack) -> None:
    prompt = long_prompt(1)
    before = stack.tokens(stack.prefill), stack.tokens(stack.decode)
    text, receipt = stack.ask(prompt)
    assert outcomes(receipt) == [("p", "prefilled"), ("d", "ok")]
    prompt_tokens = receipt["input_uncached"] + receipt.get("cache_read", 0)
    assert stack.decode.metric("warmpath:kv_loads_total", outcome="complete") == 1
    # The client pays for what the prefill engine has computed, and not for the load.
    assert receipt.get("cache_read", 0) == stack.cached(stack.prefill) == 0
    (row,) = until(lambda: stack.gateway.rows(kind="unbilled", deployment="p"))
    source = stack.decode.metric("vllm:prompt_tokens_by_source_total", source="external_kv_transfer")
    assert source == row["cache_read"]
    assert 0 < row["input_uncached"] <= BLOCK_TOKENS, "the answer's engine computes only the last block"
    assert (row["exact"], row["outcome"], row["output"]) == (True, "prefilled", 1)
    # What the ledger has of each engine is what the engine has counted.
    after = stack.tokens(stack.prefill), stack.tokens(stack.decode)
    counted = [tuple(now - then for now, then in zip(*each, strict=True)) for each in zip(after, before, strict=True)]
    assert counted == [(prompt_tokens, 1), (prompt_tokens, receipt["output"])]
    assert stack.ask(prompt, model="alone")[0] == text, "the same tokens as one engine alone"


def test_a_prompt_is_billed_as_the_prefill_engine_counted_it(stack: Stack) -> None:
    """Half of it is in that engine's cache, and the engine of the answer has nothing of it."""
    whole = long_prompt(20)
    half = whole[: len(whole) // 2]
    stack.ask(half, model="alone")  # at the prefill engine
    before = stack.cached(stack.prefill)
    reply = stack.gateway.post("chat/completions", chat(whole, max_tokens=8, temperature=0))
    usage = reply.raise_for_status().json()["usage"]
    receipt = stack.gateway.receipt(reply.headers["x-request-id"])
    assert outcomes(receipt) == [("p", "prefilled"), ("d", "ok")]
    found = stack.cached(stack.prefill) - before
    assert receipt["cache_read"] == found > 10 * BLOCK_TOKENS
    assert receipt["input_uncached"] == usage["prompt_tokens"] - found > 10 * BLOCK_TOKENS
    (row,) = until(lambda: stack.gateway.rows(kind="unbilled", call_id=receipt["call_id"]))
    loaded = usage["prompt_tokens_details"]["cached_tokens"]
    assert (row["cache_read"], row["input_uncached"]) == (loaded, usage["prompt_tokens"] - loaded)


def test_a_stream_and_several_choices(stack: Stack) -> None:
    body = chat(long_prompt(2), stream=True, n=2, max_tokens=4, stream_options={"include_usage": True})
    with Wire(stack.gateway, "chat/completions", body) as wire:
        assert wire.header("x-warmpath-deployment") == "d"
        assert wire.read_to_end().count(b'"finish_reason":"length"') == 2
        receipt = stack.gateway.receipt(wire.header("x-request-id"))
    assert outcomes(receipt) == [("p", "prefilled"), ("d", "ok")]


def test_a_client_that_leaves_ends_the_prefill(stack: Stack) -> None:
    with stack.prefill.frozen():
        wire = Wire(stack.gateway, "chat/completions", chat(long_prompt(3), max_tokens=4))
        until(lambda: stack.gateway.rows(kind="opened", deployment="p") and stack.gateway.metric("warmpath_inflight"))
        wire.leave()
        until(lambda: stack.gateway.metric("warmpath_inflight") == 0)
    until(lambda: stack.prefill.metric("vllm:num_requests_running") == 0)
    (receipt,) = until(lambda: stack.gateway.receipts(outcome="client_gone"))
    assert outcomes(receipt) == [("p", "client_gone")]


def test_a_prefill_engine_that_hangs_costs_some_time(stack: Stack) -> None:
    stack.ask(long_prompt(4))  # it works again
    with stack.prefill.frozen():
        began = time.monotonic()
        _, receipt = stack.ask(long_prompt(5))
        assert time.monotonic() - began >= LATE_MIN_SECONDS
    assert outcomes(receipt) == [("p", "timeout"), ("d", "ok")]
    assert receipt["outcome"] == "complete"


@pytest.fixture
def own_stack(tmp_path: Path) -> Iterator[Stack]:
    with ExitStack() as processes:
        yield start(tmp_path, processes)


def test_a_prefill_engine_that_is_killed_costs_the_work_that_is_done_again(own_stack: Stack) -> None:
    stack = own_stack
    stack.ask(long_prompt(8))
    # Its answer has arrived, and the decode engine begins to load from it when it is dead.
    stack.decode.process.send_signal(signal.SIGSTOP)
    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(stack.ask, long_prompt(9))
        until(lambda: len(stack.gateway.rows(kind="opened", deployment="d")) == 2)
        stack.prefill.kill()
        stack.decode.process.send_signal(signal.SIGCONT)
        text, receipt = asking.result()
    assert text
    assert outcomes(receipt) == [("p", "prefilled"), ("d", "ok")]
    (row,) = until(lambda: stack.gateway.rows(kind="unbilled", call_id=receipt["call_id"]))
    assert row["exact"], "what the dead engine has computed is known from its answer"
    assert row["input_uncached"] > 10 * BLOCK_TOKENS, "it was computed again where the answer is, and is not billed"
    # And now it is down.
    _, receipt = stack.ask(long_prompt(10))
    assert outcomes(receipt)[-1] == ("d", "ok")
    assert receipt["outcome"] == "complete"
