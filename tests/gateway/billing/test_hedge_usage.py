"""A cancelled hedge attempt with the real components: cancelled at once, recorded in the receipt, never billed."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from tests.gateway.harness import DONE, Client, Rig, a_rig, answer, chat, counted, delta, in_time, settle, usage_frame

HEDGED = {"classes": {"realtime": {"hedge": {"after": "1ms", "budget": 1.0}}}}


async def until_both_attempts(rig: Rig) -> None:
    for _ in range(1000):
        if rig.servers["a"].replies and rig.servers["b"].replies:
            return
        await asyncio.sleep(0.001)
    raise AssertionError("there was no second attempt")


def lost_tokens(rig: Rig) -> dict[str, float]:
    lines = rig.telemetry.render_metrics()[0].decode().splitlines()
    found = [line.rpartition(" ") for line in lines if line.startswith("warmpath_hedge_lost_tokens_total{")]
    return {name.partition("{")[2].rstrip("}"): float(value) for name, _, value in found}


def attempts(rig: Rig) -> list[dict[str, Any]]:
    (receipt,) = rig.receipts()
    assert receipt["deployment"] == "b" and receipt["cost"] == "0.000014"  # (10 * 1 + 2 * 2) / 1M: of the winner
    return [{name: each.get(name) for name in ("deployment", "outcome", "unbilled")} for each in receipt["attempts"]]


async def test_a_hedge_is_cancelled_at_once_and_its_record_is_in_the_receipt(tmp_path: Path) -> None:
    async with a_rig(tmp_path, **HEDGED) as rig:
        rig.servers["a"].record = json.dumps({"usage": counted(10, 1)}).encode()
        serving = rig.begin(client := Client(chat(stream=True)))
        await until_both_attempts(rig)
        cancelled, winner = rig.servers["a"].replies[0], rig.servers["b"].replies[0]
        winner.say(delta("one"))
        await in_time(client.first_bytes.wait())
        assert cancelled.closed == 1, "the other attempt is cancelled when the first chunk is passed on"
        await settle()
        winner.say(delta(" two"), usage_frame(10, 2), DONE)
        await in_time(serving)
        assert attempts(rig) == [
            {"deployment": "a", "outcome": "hedge_lost", "unbilled": {"input": 10, "output": 1, "exact": True}},
            {"deployment": "b", "outcome": "ok", "unbilled": None},
        ]
        call_id = rig.receipts()[0]["call_id"]
        assert rig.servers["a"].asked_for[0] == call_id and rig.servers["b"].asked_for == []
        assert lost_tokens(rig) == {
            'deployment="a",exact="true",kind="input"': 10.0, 'deployment="a",exact="true",kind="output"': 1.0,
        }  # fmt: skip


@pytest.mark.parametrize("has_usage_records", [True, False])
async def test_without_a_record_its_usage_is_an_estimate(tmp_path: Path, has_usage_records: bool) -> None:
    async with a_rig(tmp_path, **HEDGED) as rig:
        rig.servers["a"].has_usage_records = has_usage_records
        serving = rig.begin(Client(chat(stream=True)))
        await until_both_attempts(rig)
        rig.servers["b"].replies[0].say(delta("one"))
        await settle()
        rig.servers["b"].replies[0].say(usage_frame(10, 2), DONE)
        await in_time(serving)
        call = rig.telemetry.records[0].call
        assert call is not None
        estimate = {"input": call.prompt_tokens_estimate, "output": 0, "exact": False}
        assert attempts(rig)[0]["unbilled"] == estimate
        assert bool(rig.servers["a"].asked_for) is has_usage_records


async def test_the_receipt_does_not_wait_for_a_record(tmp_path: Path) -> None:
    """An answer in one piece is billed at once. The cancelled attempt's usage then becomes a row of its own."""
    async with a_rig(tmp_path, **HEDGED) as rig:
        deployment = rig.servers["a"]
        deployment.record, deployment.record_may_come = json.dumps({"usage": counted(10, 1)}).encode(), asyncio.Event()
        serving = rig.begin(Client(chat()))
        await until_both_attempts(rig)
        rig.servers["b"].replies[0].say(answer())
        await in_time(serving)
        assert attempts(rig)[0]["unbilled"]["exact"] is False
        deployment.record_may_come.set()
        await rig.recovery.catch_up()
        (row,) = [row for row in rig.rows() if row["kind"] == "unbilled"]
        assert (row["deployment"], row["input_uncached"], row["output"], row["exact"]) == ("a", 10, 1, True)
