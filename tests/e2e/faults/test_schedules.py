"""A thousand calls of a random schedule; `benchmarks/faults.py` makes as many as it is told."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.e2e.faults.schedules import answers_of, check_all, in_front_of_faulty_servers

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

CALLS = 1000


async def test_whatever_happens_the_client_is_told_the_truth(tmp_path: Path) -> None:
    with in_front_of_faulty_servers(tmp_path) as front:
        async with asyncio.timeout(300):
            answers = await answers_of(front, CALLS)
        ends = check_all(front, answers)
    assert ends["complete"] > CALLS / 3 and ends["upstream_cut"] > CALLS / 50, ends
