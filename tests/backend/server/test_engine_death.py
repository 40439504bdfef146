"""Engine failures: open requests get an error, and so do later ones."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import pytest
from starlette.types import ASGIApp

from backend.engine.async_engine import AsyncEngine
from backend.engine.config import EngineConfig
from backend.engine.engine import Engine
from backend.server.app import create_app
from backend.server.asgi import HttpExchange
from backend.server.completions import CompletionsEndpoint
from backend.server.components import ServerComponents
from backend.server.metrics import ServerMetrics
from backend.server.model import load_model
from backend.server.tracing import Tracer

STEPS_BEFORE_DEATH = 4


@dataclass
class FailingEngine:
    app: ASGIApp
    client: httpx2.AsyncClient

    async def post(self, **body: Any) -> httpx2.Response:
        return await self.client.post(
            "/v1/completions", json={"model": "m", "prompt": "Hello", "max_tokens": 50, "temperature": 0} | body
        )


@pytest.fixture
async def doomed(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[FailingEngine]:
    engine = Engine.load(EngineConfig(model_dir=checkpoint, dtype="float32", num_threads=1, num_blocks=32))
    steps = iter(range(STEPS_BEFORE_DEATH))
    step = engine.step

    def dying_step(*begun: Any) -> Any:
        if next(steps, None) is None:
            raise MemoryError("no more memory")
        return step(*begun)

    monkeypatch.setattr(engine, "step", dying_step)
    async_engine = AsyncEngine(engine)
    components = ServerComponents(
        model=load_model(checkpoint, "m", "m", 512),
        engine=async_engine,
        max_num_seqs=64,
        max_waiting=8,
        metrics=ServerMetrics(async_engine, "m", 16),
        tracer=Tracer(None),
    )
    app = create_app(components, asyncio.get_running_loop().create_future())
    await async_engine.start()
    transport = httpx2.ASGITransport(app)
    async with httpx2.AsyncClient(transport=transport, base_url="http://engine") as client:
        yield FailingEngine(app, client)
    await async_engine.stop()


async def test_a_stream_ends_with_an_error_and_without_done(doomed: FailingEngine) -> None:
    reply = await doomed.post(stream=True, ignore_eos=True)
    assert reply.status_code == 200
    *chunks, last, rest = reply.text.split("\n\n")
    assert chunks
    assert rest == ""
    error = json.loads(last.removeprefix("data: "))["error"]
    assert error["code"] == "engine_error"
    assert error["type"] == "server_error"
    assert "no more memory" in error["message"]


async def test_a_response_in_progress_is_500_and_later_ones_are_503(doomed: FailingEngine) -> None:
    assert (await doomed.client.get("/health")).status_code == 200
    reply = await doomed.post(ignore_eos=True, n=2)
    assert reply.status_code == 500
    assert reply.json()["error"]["code"] == "engine_error"
    for body in ({}, {"stream": True}):
        later = await doomed.post(**body)
        assert later.status_code == 503
        assert later.json()["error"]["code"] == "engine_dead"
        assert "no more memory" in later.json()["error"]["message"]
    health = await doomed.client.get("/health")
    assert health.status_code == 503
    assert "no more memory" in health.json()["reason"]
    metrics = (await doomed.client.get("/metrics")).text
    assert 'warmpath:engine_up{engine="0",model_name="m"} 0.0' in metrics
    assert 'vllm:request_success_total{engine="0",finished_reason="error",model_name="m"} 2.0' in metrics
    assert 'vllm:num_requests_running{engine="0",model_name="m"} 0.0' in metrics


async def test_an_internal_error_is_a_500_with_the_request_id_and_no_details(
    doomed: FailingEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def crash(self: CompletionsEndpoint, exchange: HttpExchange, body: bytes) -> None:
        raise RuntimeError("a secret")

    monkeypatch.setattr(CompletionsEndpoint, "handle", crash)
    transport = httpx2.ASGITransport(doomed.app, raise_app_exceptions=False)
    async with httpx2.AsyncClient(transport=transport, base_url="http://engine") as client:
        reply = await client.post("/v1/completions", json={}, headers={"x-request-id": "r1"})
    assert reply.status_code == 500
    assert reply.json()["error"]["message"] == "Internal error."
    assert reply.headers["x-request-id"] == "r1"
