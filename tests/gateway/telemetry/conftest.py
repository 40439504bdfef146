"""A collector of spans, and a call that went through every phase."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import msgspec
import pytest

from gateway.policy import Policy
from gateway.telemetry import CallRecord
from gateway.types import Attempt, Call, Operation, Outcome, PhaseTimings, Principal, Trace, Usage
from tests.otlp_collector import Collector, collecting

CANARY = "wp-dev-c4n4ry-secret"
START_NS = 1_795_000_000_000_000_000
TRACE = Trace(trace_id=0x0AF7651916CD43DD8448EB211C80319C, parent_span_id=0xB7AD6B7169203331, sampled=True)


@pytest.fixture
def collector() -> Iterator[Collector]:
    with collecting() as collector:
        yield collector


@pytest.fixture
def policy() -> Policy:
    return Policy.model_validate(
        {
            "deployments": [
                {"name": "a", "provider": "vllm", "base_url": "http://user:pw@10.0.0.5:8000/v1", "model": "Qwen/Qwen3"},
                {"name": "b", "provider": "vllm", "base_url": "https://b.internal/v1", "model": "Qwen/Qwen3"},
            ],
            "models": [{"name": "qwen3", "aliases": ["gpt-4o"], "deployments": ["a", "b"]}],
            "tenants": [{"name": "dev"}],
        }
    )


@pytest.fixture
def call(policy: Policy) -> Call:
    return Call(
        id="call-1",
        operation=Operation.CHAT,
        principal=Principal(policy.tenants[0], "dev"),
        policy=policy,
        asked_model="gpt-4o",
        model=policy.models[0],
        class_name="realtime",
        latency_class=policy.classes["realtime"],
        stream=True,
        include_usage=False,
        max_output_tokens=64,
        deterministic=False,
        fields={
            "messages": msgspec.Raw(f'[{{"role": "user", "content": "{CANARY}"}}]'.encode()),
            "temperature": msgspec.Raw(b"0.5"),
            "seed": msgspec.Raw(b"7"),
            "top_p": msgspec.Raw(b"null"),
            "n": msgspec.Raw(b"100000000000000000000"),
            "user": msgspec.Raw(f'"{CANARY}"'.encode()),
        },
        fingerprint=(1, 2),
        prompt_tokens_estimate=120,
        cache_salt=CANARY,
        service_tier="flex",
        end_user=CANARY,
        canonical_steps=("schema_order",),
        class_rule=3,
        deadline=0.0,
        trace=TRACE,
    )


def timings(*phases: tuple[str, int], started: int = 0, ended: int, first_chunk: int | None = None) -> PhaseTimings:
    """Times in microseconds since START_NS."""
    noted = PhaseTimings()
    noted.started_ns = at(started)
    noted.phases = [(name, at(us)) for name, us in phases]
    noted.first_chunk_ns = 0 if first_chunk is None else at(first_chunk)
    noted.ended_ns = at(ended)
    return noted


def at(us: int) -> int:
    return START_NS + us * 1000


@pytest.fixture
def record(call: Call) -> CallRecord:
    """Deployment a refused the connection, b answered."""
    return CallRecord(
        call_id=call.id,
        trace=TRACE,
        server_span_id=0x11,
        timings=timings(
            ("authenticate", 5),
            ("canonicalise", 20),
            ("cache.lookup", 60),
            ("admit", 80),
            ("queue", 100),
            ("route", 1100),
            ("chat", 9000),
            ("settle", 50_000),
            first_chunk=9010,
            ended=50_400,
        ),
        method="POST",
        path="/v1/chat/completions",
        status=200,
        operation=Operation.CHAT,
        principal=call.principal,
        call=call,
        outcome=Outcome.COMPLETE,
        cache="miss",
        route_choice=SimpleNamespace(reason="prefix"),
        attempts=(
            Attempt("a", "connect_error", at(1200), at(1900), 0xA1, predicted_cached_tokens=96),
            Attempt("b", "ok", at(2000), at(50_000), 0xB1, status=200, predicted_cached_tokens=64),
        ),
        deployment="b",
        usage=Usage(input_uncached=40, cache_read=80, output=30, reasoning=10, exact=True),
        response_id="chatcmpl-1",
        finish_reasons=("stop",),
        event_id="01K0EVENT",
    )
