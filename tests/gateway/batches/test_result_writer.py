"""Every answer is billed once, whenever a gateway is killed."""

import asyncio
from pathlib import Path

import msgspec
import pytest

from gateway.batches import result_writer as result_writer_module
from gateway.batches.records import BatchStatus, LineResult
from gateway.batches.runtime import LeaseLost
from tests.gateway.batches.bench import a_bench, ask, reply_of, run_to_end
from tests.gateway.harness import answer, in_time


async def test_receipts_of_a_killed_owner_are_recorded_once(tmp_path: Path) -> None:
    """The owner was killed after a result but before its receipt, or after the receipt but before the store knew it."""
    async with a_bench(tmp_path) as bench:
        bench.rig.script(answer())
        first = await run_to_end(bench, [ask("one"), ask("two")])
        assert first.completed == 2
        written, *_ = bench.rig.receipts()
        known = msgspec.json.encode(written)
        lost = msgspec.json.encode({**written, "event_id": "LOST", "call_id": "lost"})

        batch = await bench.add([ask("one"), ask("two"), ask("three")])
        await bench.store.update(
            batch.id,
            lambda each: each.entered(BatchStatus.IN_PROGRESS, 0.0, completed=2, total=3),
            results=[
                LineResult(1, True, b'{"custom_id":"c-1"}', known),
                LineResult(2, True, b'{"custom_id":"c-2"}', lost),
            ],
        )
        run = await bench.claim(batch)
        await in_time(run.run())
        events = [row["event_id"] for row in bench.rig.receipts()]
        assert len(events) == len(set(events)) == 4
        assert events.count("LOST") == 1
        assert list(await bench.lines(batch.id, "output")) == ["c-1", "c-2", "c-3"]


async def test_a_line_of_a_batch_that_another_gateway_took_over_is_neither_written_nor_billed(tmp_path: Path) -> None:
    async with a_bench(tmp_path) as bench:
        batch = await bench.add([ask("one")])
        run = await bench.claim(batch)
        live = asyncio.create_task(run.run())
        reply = await reply_of(bench, 0)
        bench.now += 60
        assert await bench.store.update(batch.id, lambda each: each.claimed("other", bench.now, 10.0))
        reply.say(answer())
        with pytest.raises(ExceptionGroup) as raised:
            await in_time(live)
        assert raised.group_contains(LeaseLost)
        assert await bench.store.finished_lines(batch.id) == []
        assert bench.rig.receipts() == []


async def test_a_batch_ends_only_after_an_unavailable_ledger_has_its_receipts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(result_writer_module, "LEDGER_RETRY_SECONDS", 0.01)
    async with a_bench(tmp_path) as bench:
        bench.rig.script(answer())
        bench.rig.ledger.fault_ahead = True
        batch = await bench.add([ask("one")])
        run = await bench.claim(batch)
        live = asyncio.create_task(run.run())
        for _ in range(1000):
            if await bench.status(batch.id) is BatchStatus.FINALIZING:
                break
            await asyncio.sleep(0.001)
        assert list(await bench.store.unrecorded_receipts(batch.id)) == [1]
        bench.rig.ledger.fault_ahead = False
        await in_time(live)
        assert (run.batch.status, len(bench.rig.receipts())) == (BatchStatus.COMPLETED, 1)
