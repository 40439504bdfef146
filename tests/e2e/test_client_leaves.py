"""A client disconnects: the engine stops its request, its limits are released, and its receipt has the actual usage."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.e2e.conftest import MAX_NUM_SEQS
from tests.e2e.processes import DEMO, Gateway, Running, Wire, chat, endless, until

pytestmark = pytest.mark.e2e

GENERATED = "vllm:generation_tokens_total"


def is_idle(engine: Running) -> bool:
    return (
        engine.metric("vllm:num_requests_running") == 0
        and engine.metric("vllm:num_requests_waiting") == 0
        and engine.metric("vllm:kv_cache_usage_perc") == 0
        and engine.metric("warmpath:integrity") == 1
    )


@pytest.fixture
def idle_engine(local_engine: Running) -> Iterator[Running]:
    until(lambda: is_idle(local_engine))
    yield local_engine
    until(lambda: is_idle(local_engine))


def is_rejected_for_concurrency(gateway: Gateway) -> bool:
    reply = gateway.post("chat/completions", chat(max_tokens=1), "single")
    return bool(reply.status_code == 429 and reply.json()["error"]["code"] == "rate_limit_exceeded")


def test_client_disconnects_during_a_stream(local_gateway: Gateway, idle_engine: Running) -> None:
    generated = idle_engine.metric(GENERATED)
    with Wire(local_gateway, "chat/completions", endless(), "single") as client:
        client.read_until(b"data: ", times=5)
        call_id = client.header("x-request-id")
        assert is_rejected_for_concurrency(local_gateway)
        frames = client.received.count(b"data: ")
    receipt = local_gateway.receipt(call_id)
    until(lambda: is_idle(idle_engine))
    # Exactly one slot is released: the next call gets it, and another call beside that does not.
    until(lambda: not is_rejected_for_concurrency(local_gateway))
    with Wire(local_gateway, "chat/completions", endless(), "single") as client:
        client.read_until(b"data: ")
        assert is_rejected_for_concurrency(local_gateway)
        second_id = client.header("x-request-id")
    second = local_gateway.receipt(second_id)
    until(lambda: is_idle(idle_engine))

    assert receipt["outcome"] == second["outcome"] == "client_gone"
    assert [attempt["outcome"] for attempt in receipt["attempts"]] == ["client_gone"]
    assert frames - 1 <= receipt["output"] < 1800
    assert receipt["exact"], "the engine's own record of the call says what was generated"
    assert receipt["input_uncached"] + receipt["cache_read"] > 0
    others = sum(row["output"] for row in local_gateway.receipts(tenant="single") if row["outcome"] == "complete")
    # The step that ran when the engine learned of the disconnection is not billed.
    assert 0 <= idle_engine.metric(GENERATED) - generated - receipt["output"] - second["output"] - others <= 2


def test_a_slot_is_free_as_soon_as_the_client_has_the_complete_answer(
    local_gateway: Gateway, idle_engine: Running
) -> None:
    for body in [chat(max_tokens=1), chat(max_tokens=1, stream=True)] * 5:
        assert local_gateway.post("chat/completions", body, "single").status_code == 200


def test_openai_client_closes_a_stream(local_gateway: Gateway, idle_engine: Running) -> None:
    aborted = idle_engine.metric("vllm:request_success_total", finished_reason="abort")
    with local_gateway.client("single") as client:
        body: dict[str, Any] = endless()
        ignore_eos = {"ignore_eos": body.pop("ignore_eos")}
        with client.chat.completions.with_streaming_response.create(**body, extra_body=ignore_eos) as reply:
            for _, line in zip(range(5), reply.iter_lines(), strict=False):
                assert not line or line.startswith("data: ")
    assert local_gateway.receipt(reply.headers["x-request-id"])["outcome"] == "client_gone"
    until(lambda: idle_engine.metric("vllm:request_success_total", finished_reason="abort") == aborted + 1)


@pytest.mark.slow
@pytest.mark.parametrize("stream", [True, False])
def test_client_disconnects_before_the_first_token(local_gateway: Gateway, idle_engine: Running, stream: bool) -> None:
    """The engine is full. The next call is queued there, and has received neither a header nor a token."""
    with Wire(local_gateway, "chat/completions", endless(n=MAX_NUM_SEQS)) as full:
        full.read_until(b"data: ")
        body = endless("I wait.") | {"stream": stream}
        traceparent = f"00-{0xFEED + stream:032x}-00000000000000aa-01"
        with Wire(local_gateway, "chat/completions", body, "single", traceparent=traceparent) as waiting:
            until(lambda: idle_engine.metric("vllm:num_requests_waiting") == 1)
            assert is_rejected_for_concurrency(local_gateway)
            assert waiting.received == b""
        until(lambda: idle_engine.metric("vllm:num_requests_waiting") == 0)
        assert idle_engine.metric("vllm:num_requests_running") == MAX_NUM_SEQS
        (receipt,) = until(lambda: local_gateway.receipts(trace_id=f"{0xFEED + stream:032x}"))
        assert receipt["outcome"] == "client_gone"
        assert receipt["output"] == 0
    until(lambda: is_idle(idle_engine))
    assert local_gateway.post("chat/completions", chat(max_tokens=1), "single").status_code == 200


def test_client_disconnects_before_a_json_answer(local_gateway: Gateway, idle_engine: Running) -> None:
    trace_id = f"{0xF00D:032x}"
    body = endless() | {"stream": False}
    traceparent = f"00-{trace_id}-00000000000000aa-01"
    with Wire(local_gateway, "chat/completions", body, "single", traceparent=traceparent):
        until(lambda: idle_engine.metric("vllm:num_requests_running") == 1)
    until(lambda: is_idle(idle_engine))
    (receipt,) = until(lambda: local_gateway.receipts(trace_id=trace_id))
    assert receipt["outcome"] == "client_gone"
    assert 0 < receipt["output"] < 1800, "the tokens that the engine generated for it"
    assert local_gateway.post("chat/completions", chat(max_tokens=1), "single").status_code == 200


def test_client_disconnects_in_the_queue(local_gateway: Gateway, idle_engine: Running) -> None:
    def depth() -> float:
        return local_gateway.metric("warmpath_queue_depth")

    with Wire(local_gateway, "chat/completions", endless() | {"model": "one-at-a-time"}) as first:
        first.read_until(b"data: ")
        rows = len(local_gateway.receipts(tenant="single"))
        with Wire(local_gateway, "chat/completions", endless() | {"model": "one-at-a-time"}, "single"):
            until(lambda: depth() == 1)
            assert is_rejected_for_concurrency(local_gateway)
        until(lambda: depth() == 0)
        until(lambda: not is_rejected_for_concurrency(local_gateway))
        # No request was sent upstream: nothing is billed, and no slot was taken.
        incomplete = [row for row in local_gateway.receipts(tenant="single")[rows:] if row["outcome"] != "complete"]
        assert incomplete == []
        assert local_gateway.metric("warmpath_deployment_inflight", deployment="one-slot") == 1
    until(lambda: local_gateway.metric("warmpath_deployment_inflight", deployment="one-slot") == 0)
    with local_gateway.client("single") as client:
        reply = client.chat.completions.create(model="one-at-a-time", messages=chat()["messages"], max_tokens=2)
        assert reply.choices


@pytest.mark.slow
async def test_async_openai_client_cancels_a_stream(local_gateway: Gateway, idle_engine: Running) -> None:
    async with local_gateway.async_client() as client:
        stream: openai.AsyncStream[Any] = await client.chat.completions.create(
            model=DEMO,
            messages=[{"role": "user", "content": "Count."}],
            max_tokens=1800,
            extra_body={"ignore_eos": True},
            stream=True,
        )
        async with stream:
            async for _ in stream:
                break
    until(lambda: is_idle(idle_engine))
    assert local_gateway.receipt(stream.response.headers["x-request-id"])["outcome"] == "client_gone"
