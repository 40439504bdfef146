"""KV events and load metrics from an engine process to a gateway process."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.e2e.processes import DEMO, Gateway, Running, deployment, engine, gateway, simple_policy, until

pytestmark = pytest.mark.slow

BLOCK_TOKENS = 16
TEXT_BLOCK_TOKENS = 160  # at most, of a fingerprint block of 256 bytes
NUM_BLOCKS = 120  # one and a half of the prompts below


def prompt(number: int) -> list[dict[str, Any]]:
    rng = random.Random(number)
    words = " ".join("".join(rng.choices("etaoinshrdlu", k=rng.randint(2, 9))) for _ in range(400))
    return [{"role": "user", "content": words}]


@pytest.fixture(scope="module")
def small_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Running, str, str]]:
    folder = tmp_path_factory.mktemp("engine")
    events, replay = f"ipc://{folder}/events", f"ipc://{folder}/replay"
    options = ["--num-blocks", str(NUM_BLOCKS), "--kv-events", events, "--kv-events-replay", replay]
    with engine(folder, *options) as started:
        yield started, events, replay


@contextmanager
def gateway_of(small_engine: tuple[Running, str, str], folder: Path) -> Iterator[Gateway]:
    started, events, replay = small_engine
    fields = {"kv_events": events, "kv_events_replay": replay, "metrics": True}
    policy = simple_policy(
        started.url, deployments=[deployment("local", started.url, **fields)], cache={"scope": "off"}
    )
    with gateway(folder, policy) as running:
        yield running


@pytest.fixture
def small_gateway(small_engine: tuple[Running, str, str], tmp_path: Path) -> Iterator[Gateway]:
    with gateway_of(small_engine, tmp_path) as running:
        yield running


def send_prompt(gateway: Gateway, number: int) -> tuple[int, int]:
    """Predicted and reported cached tokens."""
    reply = gateway.post("chat/completions", {"model": DEMO, "messages": prompt(number), "max_tokens": 4})
    row = gateway.receipt(reply.raise_for_status().headers["x-request-id"])
    return row["attempts"][-1]["predicted_cached_tokens"], row["cache_read"]


@pytest.mark.e2e
def test_evictions_and_load_are_known(small_gateway: Gateway) -> None:
    until(lambda: small_gateway.metric("warmpath_deployment_reported", what="running") == 0)
    assert send_prompt(small_gateway, 1)[1] == 0
    predicted, reported = send_prompt(small_gateway, 1)
    assert reported > 700
    assert abs(predicted - reported) <= BLOCK_TOKENS
    send_prompt(small_gateway, 2)  # evicts most of the first prompt
    until(lambda: small_gateway.metric("warmpath_kv_blocks") <= NUM_BLOCKS)
    until(lambda: small_gateway.metric("warmpath_kv_calls_total", blocks="known") == 3)
    predicted, reported = send_prompt(small_gateway, 1)
    assert 0 < reported < 700
    assert abs(predicted - reported) <= TEXT_BLOCK_TOKENS + BLOCK_TOKENS
    assert small_gateway.metric("warmpath_kv_calls_total", blocks="unknown") == 0
    assert small_gateway.metric("warmpath_kv_event_batches_total", kind="gaps") == 0


@pytest.mark.e2e
def test_a_gateway_that_starts_later_replays_missed_events(
    small_engine: tuple[Running, str, str], tmp_path: Path
) -> None:
    body = {"model": DEMO, "messages": prompt(3), "max_tokens": 4}
    httpx2.post(f"{small_engine[0].url}/v1/chat/completions", json=body, timeout=60).raise_for_status()
    with gateway_of(small_engine, tmp_path) as later:
        until(lambda: later.metric("warmpath_kv_blocks") > 0)
    assert small_engine[0].metric("warmpath:integrity") == 1
