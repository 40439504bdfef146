from __future__ import annotations

import httpx2
import pytest

from backend.server.records import RECORDS_MAX, Records, Usage
from tests.backend.server.conftest import RunningServer
from tests.backend.server.test_server_ends import ENDLESS, until

pytestmark = pytest.mark.e2e


def test_records_are_bounded_and_the_oldest_goes_first() -> None:
    records = Records()
    for i in range(RECORDS_MAX + 1):
        records.add(str(i), Usage(i, 0, 0))
    assert records.get("0") is None
    assert records.get("1") == Usage(1, 0, 0)
    records.add("1", Usage(5, 5, 0))
    assert records.get("1") == Usage(5, 5, 0)


async def test_a_stream_that_was_left_has_what_was_generated_on_record(server: RunningServer) -> None:
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
