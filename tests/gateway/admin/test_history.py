"""`GET /admin/history`: what is computed from the points on disk, by group, and its errors."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2
import pytest
from starlette.applications import Starlette

from gateway.admin.history import HistoryEndpoint
from gateway.endpoints.replies import EXCEPTION_HANDLERS
from gateway.telemetry.call_sums import GroupedSums, Sums
from gateway.telemetry.history import Load, Point, append

Ask = Callable[..., Any]


def sums(answered: int, failed: int = 0, ttft: int = 80) -> Sums:
    return Sums(
        results={"answered": answered, **({"failed": failed} if failed else {})},
        errors={"timeout": failed} if failed else {},
        ttft={ttft: answered},
        prompt_tokens=100 * answered,
        cached_tokens=25 * answered,
        output_tokens=answered,
        cost={"USD": answered * 1_000_000},
    )


@pytest.fixture
def ask(tmp_path: Path) -> Ask:
    app = Starlette(routes=HistoryEndpoint(tmp_path).routes(), exception_handlers=EXCEPTION_HANDLERS)

    async def request(status: int = 200, **query: str) -> Any:
        async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app=app), base_url="http://admin") as client:
            reply = await client.get("/admin/history", params=query)
        assert reply.status_code == status, reply.text
        return reply.json()

    return request


def record(folder: Path, minutes: int = 3) -> int:
    """Points of the last minutes, the last of which ended just now. Returns their number."""
    last = int(time.time() - time.time() % 10) - 10
    for i in range(6 * minutes):
        total = sums(2, failed=1) if i % 2 else sums(2, ttft=160)
        groups = GroupedSums(total, {"realtime": sums(1), "batch": sums(1)}, {"m": total}, {"a": sums(2)})
        append(folder / "0.db", Point(last - 10 * i, 10.0, groups, Load(3, {"batch": 4, "realtime": 1}, {"a": 2}), i))
    return 6 * minutes


async def test_nothing_yet(ask: Ask) -> None:
    found = await ask()
    assert (found["points"], found["last_minute"], found["summary"]) == ([], None, None)


async def test_points_and_sums(ask: Ask, tmp_path: Path) -> None:
    count = record(tmp_path)
    found = await ask(span="15m")
    assert (len(found["points"]), found["step_seconds"]) == (count, 10)
    names = {by: list(entries) for by, entries in found["by"].items()}
    assert names == {"class": ["batch", "realtime"], "model": ["m"], "deployment": ["a"]}
    assert found["by"]["class"]["batch"]["results"] == {"answered": count}
    point = found["points"][-1]
    assert point["results"] == {"answered": 2} and point["cost"] == {"USD": 0.002}
    assert (point["queued"], point["in_flight"], point["hit_rate"]) == (5, 3, 0.25)
    last, whole = found["last_minute"], found["summary"]
    assert last["results"] == {"answered": 12, "failed": 3} and last["seconds"] == 60
    assert whole["results"] == {"answered": 2 * count, "failed": count // 2}
    assert whole["errors"] == {"timeout": count // 2}
    assert whole["storage_timeouts"] == sum(range(count))
    # Half of the calls are in a bucket at 1 s (2 ** 10 ms), half in one at 1024 times as much.
    assert whole["ttft_ms"]["p50"] == pytest.approx(1024, rel=0.1)
    assert whole["ttft_ms"]["p99"] == pytest.approx(2**20, rel=0.1)
    assert point["ttft_ms"]["p99"] == pytest.approx(2**20, rel=0.1), "times of a point are those of a minute"


@pytest.mark.parametrize("span", ["6h", "24h", "7d"])
async def test_long_spans_have_coarse_steps(ask: Ask, tmp_path: Path, span: str) -> None:
    count = record(tmp_path)
    found = await ask(span=span)
    assert found["step_seconds"] == 600 and 1 <= len(found["points"]) <= 2
    assert found["summary"]["results"]["answered"] == 2 * count
    assert found["last_minute"]["results"]["answered"] == 12


async def test_groups(ask: Ask, tmp_path: Path) -> None:
    count = record(tmp_path)
    batch = await ask(span="1h", **{"class": "batch"})
    assert batch["summary"]["results"] == {"answered": count}
    assert (batch["points"][0]["queued"], batch["points"][0]["in_flight"]) == (4, None)
    one = await ask(span="1h", deployment="a")
    assert one["summary"]["results"] == {"answered": 2 * count}
    assert (one["points"][0]["queued"], one["points"][0]["in_flight"]) == (None, 2)
    none = await ask(span="1h", model="unknown")
    assert none["summary"]["results"] == {} and none["summary"]["hit_rate"] is None


async def test_errors_name_the_parameter(ask: Ask) -> None:
    assert (await ask(400, span="1y"))["error"]["param"] == "span"
    assert (await ask(400, model="m", deployment="a"))["error"]["param"] == "deployment"
