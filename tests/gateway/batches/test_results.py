"""That every answer is billed once, whoever is killed when."""

import asyncio
from pathlib import Path

import msgspec
import pytest

from gateway.batches import results as results_module
from gateway.batches.records import Result, Status
from gateway.batches.workshop import LeaseLost
from tests.gateway.batches.workshops import a_bench, ask, reply_of, run_to_its_end
from tests.gateway.harness import answer, in_time


async def test_a_killed_owners_receipts_are_written_once(tmp_path: Path) -> None:
    """It was killed between a result and its receipt, or between the receipt and the note that it is there."""
    async with a_bench(tmp_path) as bench:
        bench.rig.script(answer())
        first = await run_to_its_end(bench, [ask("one"), ask("two")])
        assert first.completed == 2
        written, *_ = bench.rig.receipts()
        known = msgspec.json.encode(written)
        lost = msgspec.json.encode({**written, "event_id": "LOST", "call_id": "lost"})

        batch = await bench.add([ask("one"), ask("two"), ask("three")])
        await bench.store.update(
            batch.id,
            lambda each: each.entered(Status.IN_PROGRESS, 0.0, completed=2, total=3),
            results=[
                Result(1, True, b'{"custom_id":"c-1"}', known),
                Result(2, True, b'{"custom_id":"c-2"}', lost),
            ],
        )
        run = await bench.claim(batch)
        await in_time(run.live())
        events = [row["event_id"] for row in bench.rig.receipts()]
        assert len(events) == len(set(events)) == 4
        assert events.count("LOST") == 1
        assert list(await bench.lines(batch.id, "output")) == ["c-1", "c-2", "c-3"]


async def test_what_another_owner_has_taken_is_neither_written_nor_billed(tmp_path: Path) -> None:
    async with a_bench(tmp_path) as bench:
        batch = await bench.add([ask("one")])
        run = await bench.claim(batch)
        live = asyncio.create_task(run.live())
        told = await reply_of(bench, 0)
        bench.now += 60
        assert await bench.store.update(batch.id, lambda each: each.claimed("other", bench.now, 10.0))
        told.say(answer())
        with pytest.raises(ExceptionGroup) as raised:
            await in_time(live)
        assert raised.group_contains(LeaseLost)
        assert await bench.store.done(batch.id) == []
        assert bench.rig.receipts() == []


async def test_a_ledger_that_can_not_be_written_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results_module, "LEDGER_RETRY_SECONDS", 0.01)
    async with a_bench(tmp_path) as bench:
        bench.rig.script(answer())
        bench.rig.ledger.fault_ahead = True
        batch = await bench.add([ask("one")])
        run = await bench.claim(batch)
        live = asyncio.create_task(run.live())
        for _ in range(1000):
            if await bench.status(batch.id) is Status.FINALIZING:
                break
            await asyncio.sleep(0.001)
        assert list(await bench.store.owed(batch.id)) == [1]
        bench.rig.ledger.fault_ahead = False
        await in_time(live)
        assert (run.batch.status, len(bench.rig.receipts())) == (Status.COMPLETED, 1)
