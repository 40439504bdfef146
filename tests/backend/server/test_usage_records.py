"""Usage records: bounds, expiry, and agreement with the engine's counters."""

from __future__ import annotations

import asyncio

import httpx2
import pytest

from backend.server.usage_records import RECORD_SECONDS, RECORDS_MAX, TokenUsage, UsageRecords
from tests.backend.server.conftest import RunningServer
from tests.backend.server.test_disconnects_and_shutdown import ENDLESS, until

pytestmark = pytest.mark.e2e


def test_records_are_bounded_and_the_oldest_is_evicted() -> None:
    usage_records = UsageRecords()
    for i in range(RECORDS_MAX + 1):
        usage_records.add(str(i), TokenUsage(i, 0, 0))
    assert usage_records.get("0") is None
    assert usage_records.get("1") == TokenUsage(1, 0, 0)
    usage_records.add("1", TokenUsage(5, 5, 0))
    assert usage_records.get("1") == TokenUsage(5, 5, 0)


def test_records_expire() -> None:
    now = 0.0
    usage_records = UsageRecords(clock=lambda: now)
    usage_records.add("old", TokenUsage(1, 0, 0))
    now = RECORD_SECONDS - 1
    assert usage_records.get("old")
    now = RECORD_SECONDS
    assert usage_records.get("old") is None
    usage_records.add("new", TokenUsage(1, 0, 0))
    assert list(usage_records._records) == ["new"]


def test_a_running_request_has_no_record_until_it_has_finished() -> None:
    usage_records, usage = UsageRecords(), list[TokenUsage]()
    usage_records.add("a", lambda: usage[0] if usage else None)
    assert usage_records.get("a") is None and usage_records._unresolved
    usage.append(TokenUsage(1, 2, 0))
    usage_records.add("b", TokenUsage(0, 0, 0))
    assert usage_records.get("a") == TokenUsage(1, 2, 0) and not usage_records._unresolved


async def test_an_abandoned_stream_has_a_record_of_its_generated_tokens(server: RunningServer) -> None:
    body = {"model": server.model, "stream": True, **ENDLESS}
    async with httpx2.AsyncClient(base_url=server.url) as client:
        assert (await client.get("/requests/left-early")).status_code == 404
        async with client.stream("POST", "/v1/completions", json=body, headers={"x-request-id": "left-early"}) as reply:
            frames = reply.aiter_lines()
            seen = 0
            while seen < 5:
                seen += (await anext(frames)).startswith("data:")
        await until(lambda: httpx2.get(f"{server.url}/requests/left-early").status_code == 200)
        usage = (await client.get("/requests/left-early")).json()["usage"]
    assert usage["prompt_tokens"] > 0
    assert usage["completion_tokens"] >= seen


async def test_the_records_add_up_to_the_engines_own_counters(server: RunningServer) -> None:
    """Including tokens that were computed but not delivered when a client disconnected, exactly."""
    counters = ("vllm:prompt_tokens_total", "vllm:generation_tokens_total")

    def counted() -> list[float]:
        lines = httpx2.get(f"{server.url}/metrics").text.splitlines()
        return [float(line.rsplit(" ", 1)[1]) for name in counters for line in lines if line.startswith(name)]

    before, ids = counted(), [f"counted-{number}" for number in range(20)]
    body = {"model": server.model, "stream": True, **ENDLESS}
    async with httpx2.AsyncClient(base_url=server.url) as client:

        async def leave_after(frames_wanted: int, request_id: str) -> None:
            headers = {"x-request-id": request_id}
            payload = body | {"n": 1 + frames_wanted % 3}
            async with client.stream("POST", "/v1/completions", json=payload, headers=headers) as reply:
                frames = reply.aiter_lines()
                for _ in range(frames_wanted):
                    await anext(frames)

        await asyncio.gather(*(leave_after(number, request_id) for number, request_id in enumerate(ids)))
        await until(lambda: all(httpx2.get(f"{server.url}/requests/{each}").status_code == 200 for each in ids))
        usages = [(await client.get(f"/requests/{each}")).json()["usage"] for each in ids]
    reported = [sum(usage[name] for usage in usages) for name in ("prompt_tokens", "completion_tokens")]
    assert [after - start for after, start in zip(counted(), before, strict=True)] == reported
