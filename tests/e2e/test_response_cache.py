"""Equal calls: the engine computes one, whether they are concurrent or repeated, and the others cost nothing."""

from __future__ import annotations

import asyncio
import secrets
from collections import Counter
from decimal import Decimal

import httpx2
import pytest

from tests.e2e.processes import DEMO, PATIENCE_SECONDS, Gateway, Running, chat, events, key, text_of

pytestmark = pytest.mark.e2e

CALLS = 20
GENERATED = "vllm:generation_tokens_total"


@pytest.mark.parametrize("stream", [True, False])
async def test_equal_calls_are_computed_once(local_gateway: Gateway, local_engine: Running, stream: bool) -> None:
    body = chat(secrets.token_hex(8), temperature=0, stream=stream, max_tokens=60, ignore_eos=True)
    if stream:
        body["stream_options"] = {"include_usage": True}
    before = local_engine.metric(GENERATED)
    headers = {"authorization": f"Bearer {key('crowd')}"}
    async with httpx2.AsyncClient(timeout=PATIENCE_SECONDS, headers=headers) as client:
        url = f"{local_gateway.url}/v1/chat/completions"
        together = await asyncio.gather(*(client.post(url, json=body) for _ in range(CALLS)))
        later = await client.post(url, json=body)
    assert local_engine.metric(GENERATED) - before == 60
    assert {reply.status_code for reply in (*together, later)} == {200}
    assert {reply.content for reply in (*together, later)} == {later.content}, "the same, frame by frame"
    text = text_of(events(later.text)) if stream else later.json()["choices"][0]["message"]["content"]
    assert text

    kinds = Counter(reply.headers.get("x-warmpath-cache", "computed") for reply in together)
    assert kinds["computed"] == 1
    assert kinds["shared"] + kinds["hit"] == CALLS - 1
    assert later.headers["x-warmpath-cache"] == "hit"
    receipts = [local_gateway.receipt(reply.headers["x-request-id"]) for reply in (*together, later)]
    assert Counter(row["source"] for row in receipts) == {"engine": 1, "cache": CALLS}
    for row in receipts:
        assert row["outcome"] == "complete"
        assert row["output"] == 60
        assert (Decimal(row["cost"]) == 0) == (row["source"] == "cache")
        assert bool(row["attempts"]) == (row["source"] == "engine")


def test_cached_answers_are_not_shared_between_tenants(local_gateway: Gateway, local_engine: Running) -> None:
    body = chat(secrets.token_hex(8), temperature=0, max_tokens=4, ignore_eos=True)
    before = local_engine.metric(GENERATED)
    first, other = (local_gateway.post("chat/completions", body, who) for who in ("dev", "crowd"))
    assert "x-warmpath-cache" not in other.headers
    assert first.json()["choices"] == other.json()["choices"]
    assert local_engine.metric(GENERATED) - before == 8
    assert other.headers["x-warmpath-cached-tokens"] == "0", "the engine's prefix cache is not shared either"


def test_sampled_answers_are_not_cached(local_gateway: Gateway, local_engine: Running) -> None:
    before = local_engine.metric(GENERATED)
    for _ in range(2):
        reply = local_gateway.post("chat/completions", chat(temperature=1, max_tokens=4, ignore_eos=True))
        assert "x-warmpath-cache" not in reply.headers
    assert local_engine.metric(GENERATED) - before == 8


def test_embeddings_are_cached(local_gateway: Gateway) -> None:
    body = {"model": DEMO, "input": secrets.token_hex(8)}
    first, second = (local_gateway.post("embeddings", body) for _ in range(2))
    assert second.headers["x-warmpath-cache"] == "hit"
    assert first.json() == second.json()


def test_errors_are_not_cached(local_gateway: Gateway) -> None:
    body = chat("too long " * 3000, temperature=0)
    for _ in range(2):
        reply = local_gateway.post("chat/completions", body)
        assert reply.status_code == 400
        assert "x-warmpath-cache" not in reply.headers
