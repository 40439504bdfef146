"""A cancelled hedge attempt: the engine stops at once, and its work is recorded to the token."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx2
import pytest

from tests.e2e.conftest import MAX_NUM_SEQS
from tests.e2e.faults.test_scenarios import WHOLE
from tests.e2e.faults.upstreams import TOKENS, Request, listening
from tests.e2e.processes import (
    DEMO,
    PRICE,
    Running,
    Wire,
    chat,
    deployment,
    endless,
    events,
    gateway,
    simple_policy,
    text_of,
    until,
)

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

RECORD_SECONDS = 1.0  # of the answer, in which the gateway reads the engine's record


def test_the_work_of_a_cancelled_hedge_is_recorded_and_not_billed(tmp_path: Path, local_engine: Running) -> None:
    stopped = threading.Event()  # set when the engine has stopped

    async def quick(request: Request) -> None:
        await request.head()
        await request.tokens(0, TOKENS // 2)
        while not stopped.is_set():
            await asyncio.sleep(0.01)
        await asyncio.sleep(RECORD_SECONDS)
        await request.tokens(TOKENS // 2, TOKENS)
        await request.finish()

    def aborted() -> float:
        return local_engine.metric("vllm:request_success_total", finished_reason="abort")

    with listening({"quick": quick}) as upstreams:
        policy = simple_policy(
            local_engine.url,
            deployments=[
                deployment("engine", local_engine.url, prefill_tokens_per_second="1M"),
                {
                    "name": "quick", "base_url": f"http://127.0.0.1:{upstreams.ports['quick']}/v1", "model": "m",
                    "price": PRICE, "prefill_tokens_per_second": 1000,
                },
            ],
            models=[{"name": DEMO, "deployments": ["engine", "quick"]}],
            classes={"realtime": {"hedge": {"after": "1s", "budget": 1.0}}},
            cache={"scope": "off"},
        )  # fmt: skip
        with (
            gateway(tmp_path / "gateway", policy) as front,
            Wire(local_engine, "chat/completions", endless(n=MAX_NUM_SEQS)) as full,
            ThreadPoolExecutor(1) as elsewhere,
        ):
            full.read_until(b"data: ")  # from now on, other requests are queued in the engine
            before = aborted()
            asking = elsewhere.submit(front.post, "chat/completions", chat(stream=True))
            until(lambda: aborted() > before)
            stopped.set()
            reply = asking.result()
            assert text_of(events(reply.text)) == WHOLE
            call_id = reply.headers["x-request-id"]
            receipt = front.receipt(call_id)
            loser, winner = receipt["attempts"]
            assert (loser["deployment"], loser["outcome"], winner["outcome"]) == ("engine", "hedge_lost", "ok")
            record = httpx2.get(f"{local_engine.url}/requests/{call_id}").json()["usage"]
            assert loser["unbilled"] == {
                "input": record["prompt_tokens"], "output": record["completion_tokens"], "exact": True,
            }  # fmt: skip
            assert (receipt["deployment"], receipt["output"], receipt["cost"]) == ("quick", TOKENS, "0.000025")
            (row,) = until(lambda: front.rows(kind="unbilled", call_id=call_id))
            assert (row["deployment"], row["output"], row["exact"]) == ("engine", record["completion_tokens"], True)
