"""A thousand calls of a random schedule. `benchmarks/faults.py` makes more."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.e2e.faults.schedules import check_all, gateway_with_faulty_deployments, send_requests

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

CALLS = 1000


async def test_random_failures_are_reported_truthfully(tmp_path: Path) -> None:
    with gateway_with_faulty_deployments(tmp_path) as front:
        async with asyncio.timeout(300):
            answers = await send_requests(front, CALLS)
        ends = check_all(front, answers)
    assert ends["complete"] > CALLS / 3 and ends["upstream_cut"] > CALLS / 50, ends
