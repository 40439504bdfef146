"""Two engines behind the gateway: a conversation moves, and its prompt's blocks are loaded, not computed again."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import pytest

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
    tenant,
    until,
)

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

BLOCK_TOKENS = 16
TEXT_BLOCK_TOKENS = 160  # at most, of a fingerprint block of 256 bytes


@dataclass(frozen=True)
class Stack:
    gateway: Gateway
    engines: dict[str, Running]

    def ask(self, prompt: str, **fields: Any) -> tuple[str, dict[str, Any]]:
        """An answer and its receipt."""
        reply = self.gateway.post("chat/completions", chat(prompt, max_tokens=8, temperature=0, **fields))
        body = reply.raise_for_status().json()
        return body["choices"][0]["message"]["content"], self.gateway.receipt(reply.headers["x-request-id"])

    def num_loads(self, deployment: str, source: str) -> float:
        return self.gateway.metric("warmpath_block_loads_total", deployment=deployment, source=source)

    def occupy(self, name: str, prompt: str) -> Wire:
        """Takes the only slot of the deployment that has the prompt cached, until the client leaves."""
        body = chat(prompt, stream=True, max_tokens=1000, n=16, ignore_eos=True)  # takes far longer than a test
        wire = Wire(self.gateway, "chat/completions", body)
        assert wire.header("x-warmpath-deployment") == name
        return wire


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    options = ("--kv-transfer", "--kv-transfer-peers", "127.0.0.1", "--kv-transfer-seconds", "1")
    folder = tmp_path_factory.mktemp("stack")
    with engine(folder / "a", *options) as a, engine(folder / "b", *options) as b:
        engines = {"a": a, "b": b}
        policy = simple_policy(
            a.url,
            deployments=[
                deployment(name, each.url, max_concurrency=1, kv_transfer_tokens_per_second="1M")
                for name, each in engines.items()
            ],
            models=[{"name": DEMO, "deployments": ["a", "b"]}],
            tenants=[tenant("dev"), tenant("rival")],
            cache={"scope": "off"},
        )
        with gateway(folder / "gateway", policy) as started:
            yield Stack(started, engines)


def long_prompt(seed: int) -> str:
    rng = random.Random(seed)
    return " ".join("".join(rng.choices("etaoinshrdlu", k=rng.randint(2, 9))) for _ in range(120))


def other(name: str) -> str:
    return "b" if name == "a" else "a"


def test_a_conversation_that_moves_is_not_computed_again(stack: Stack) -> None:
    prompt = long_prompt(1)
    _, first = stack.ask(prompt)
    assert first["cache_read"] == 0
    home, away = first["deployment"], other(first["deployment"])
    with stack.occupy(home, prompt):
        text, moved = stack.ask(prompt + " And then?")
    assert moved["deployment"] == away
    assert stack.num_loads(away, home) == 1
    tokens = first["input_uncached"]
    assert moved["cache_read"] > tokens - TEXT_BLOCK_TOKENS
    assert moved["input_uncached"] + moved["cache_read"] > tokens, "the whole prompt is billed, and once"
    assert (moved["exact"], moved["outcome"]) == (True, "complete")
    predicted = moved["attempts"][-1]["predicted_cached_tokens"]
    assert abs(predicted - moved["cache_read"]) <= TEXT_BLOCK_TOKENS
    engine = stack.engines[away]
    assert engine.metric("warmpath:kv_loads_total", outcome="complete") == 1
    assert engine.metric("vllm:prompt_tokens_by_source_total", source="external_kv_transfer") == moved["cache_read"]
    until(lambda: stack.engines[home].metric("vllm:num_requests_running") == 0)
    assert stack.ask(prompt + " And then?")[0] == text
    assert stack.gateway.metric("warmpath_block_loads_total") == 1, "both have it: a call was using it at home"


def test_a_conversation_that_moves_takes_its_blocks_along(stack: Stack) -> None:
    """So both caches together have it once. It comes back in the same way."""
    prompt = long_prompt(4)
    _, first = stack.ask(prompt)
    home, away = first["deployment"], other(first["deployment"])
    tokens = first["input_uncached"]
    blocker = next(one for one in map(long_prompt, range(10, 30)) if stack.ask(one)[1]["deployment"] == home)
    with stack.occupy(home, blocker):
        _, moved = stack.ask(prompt + " And then?")
        stack.ask(long_prompt(5))
    sent = stack.engines[away].metric("warmpath:kv_blocks_sent_total")
    with stack.occupy(away, long_prompt(5)):
        _, back = stack.ask(prompt + " And then? And then?")
    assert (moved["deployment"], back["deployment"]) == (away, home)
    for receipt in (moved, back):
        assert receipt["cache_read"] > tokens - TEXT_BLOCK_TOKENS
    all_but_the_template = (tokens - TEXT_BLOCK_TOKENS) // BLOCK_TOKENS
    assert stack.engines[away].metric("warmpath:kv_blocks_sent_total") - sent >= all_but_the_template


def test_a_tenant_gets_no_blocks_of_another_one(stack: Stack) -> None:
    """Each has its own salt, so an equal prompt has other hashes. Nor can a client name a salt or an engine."""
    prompt = long_prompt(2)
    _, first = stack.ask(prompt)
    home, away = first["deployment"], other(first["deployment"])
    address = urlsplit(stack.engines[home].url)
    params = {"do_remote_prefill": True, "remote_host": address.hostname, "remote_port": address.port}
    loads = stack.engines[away].metric("warmpath:kv_loads_total")
    with stack.occupy(home, prompt):
        body = chat(prompt, max_tokens=2, kv_transfer_params=params)
        reply = stack.gateway.post("chat/completions", body, tenant="rival")
    receipt = stack.gateway.receipt(reply.raise_for_status().headers["x-request-id"])
    assert (receipt["deployment"], receipt["cache_read"]) == (away, 0)
    assert stack.engines[away].metric("warmpath:kv_loads_total") == loads


def test_a_source_that_hangs_costs_the_engines_time_limit(stack: Stack) -> None:
    prompt = long_prompt(3)
    _, first = stack.ask(prompt)
    home, away = first["deployment"], other(first["deployment"])
    before = stack.engines[away].metric("warmpath:kv_loads_total", outcome="timeout")
    with stack.occupy(home, prompt), stack.engines[home].frozen():
        _, moved = stack.ask(prompt + " And then?")
    assert moved["deployment"] == away
    assert moved["cache_read"] < 2 * BLOCK_TOKENS
    assert moved["outcome"] == "complete"
    assert stack.engines[away].metric("warmpath:kv_loads_total", outcome="timeout") - before == 1
