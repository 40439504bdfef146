import asyncio
from pathlib import Path

import pytest

from gateway.batches import worker as worker_module
from gateway.batches.records import Batch, BatchStatus
from gateway.batches.worker import LEASE_SECONDS, BatchWorker
from gateway.core.errors import StorageUnavailable
from tests.gateway.batches.bench import Bench, a_bench, ask, reply_of
from tests.gateway.harness import answer


async def until_status(bench: Bench, batch_id: str, *wanted: BatchStatus) -> None:
    for _ in range(2000):
        if await bench.status(batch_id) in wanted:
            return
        await asyncio.sleep(0.001)
    raise AssertionError(f"the batch is still {await bench.status(batch_id)}")


async def test_open_batches_are_found_and_run_to_their_end(tmp_path: Path) -> None:
    async with a_bench(tmp_path) as bench:
        bench.rig.script(answer())
        worker = BatchWorker(bench.runtime)
        worker.start()
        batches = [await bench.add([ask(f"{number}")]) for number in range(3)]
        worker.wake()
        for batch in batches:
            await until_status(bench, batch.id, BatchStatus.COMPLETED)
        await worker.close()
        assert worker.runs == 0


async def test_an_outage_of_the_store_is_logged_once_and_its_end_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = iter([StorageUnavailable("away"), StorageUnavailable("away"), None, None])
    over = asyncio.Event()
    async with a_bench(tmp_path) as bench:
        worker = BatchWorker(bench.runtime)
        there = bench.store.open_batches

        async def open_batches() -> list[Batch]:
            worker.wake()
            error = next(answers, over)
            if error is over:
                over.set()
            if isinstance(error, StorageUnavailable):
                raise error
            return await there()

        monkeypatch.setattr(bench.store, "open_batches", open_batches)
        worker.start()
        await asyncio.wait_for(over.wait(), 20)
        await worker.close()
    assert [record.getMessage() for record in caplog.records] == [
        "batch storage is unavailable, batches are paused: away",
        "batch storage is available again",
    ]


async def test_the_worker_counts_lines_waiting_and_in_flight(tmp_path: Path) -> None:
    async with a_bench(tmp_path, batches={"concurrency": 1}) as bench:
        worker = BatchWorker(bench.runtime)
        batch = await bench.add([ask("one"), ask("two"), ask("three")])
        worker.start()
        reply = await reply_of(bench, 0)
        assert worker.lines == (2, 1) and worker.open_batches.total() == 1
        bench.rig.script(answer())
        reply.say(answer())
        await until_status(bench, batch.id, BatchStatus.COMPLETED)
        worker.wake()
        for _ in range(1000):
            if not worker.runs and not worker.open_batches:
                break
            await asyncio.sleep(0.001)
        assert worker.lines == (0, 0) and worker.ended == {BatchStatus.COMPLETED: 1} and not worker.open_batches
        await worker.close()


async def test_a_closing_gateway_releases_its_leases_at_once(tmp_path: Path) -> None:
    async with a_bench(tmp_path) as bench:
        worker = BatchWorker(bench.runtime)
        batch = await bench.add([ask("one")])
        worker.start()
        await reply_of(bench, 0)
        await worker.close()
        assert await bench.store.update(batch.id, lambda each: each.claimed("other", bench.now, 10.0))


async def test_a_lease_is_extended_while_a_batch_runs_and_a_cancelled_batch_is_stopped(tmp_path: Path) -> None:
    async with a_bench(tmp_path) as bench:
        worker = BatchWorker(bench.runtime)
        batch = await bench.add([ask("one")])
        worker.start()
        await reply_of(bench, 0)
        bench.now += LEASE_SECONDS - 1
        worker.wake()
        for _ in range(1000):
            extended = await bench.store.batch(batch.id)
            assert extended is not None
            if extended.leased_until > bench.now + 1:
                break
            await asyncio.sleep(0.001)
        assert extended is not None and extended.leased_until == bench.now + LEASE_SECONDS
        await bench.store.update(batch.id, lambda each: each.cancelling(bench.now))
        worker.wake()
        await until_status(bench, batch.id, BatchStatus.CANCELLED)
        await worker.close()


async def test_tenants_take_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_module, "RUNS_MAX", 2)
    async with a_bench(tmp_path) as bench:
        worker = BatchWorker(bench.runtime)
        first = await bench.add([ask("first")])
        worker.start()
        await reply_of(bench, 0)
        await bench.add([ask("second")])
        other = await bench.add([ask("other")], tenant="u")
        worker.wake()
        await reply_of(bench, 1)
        running = [batch.id for batch in await bench.store.open_batches() if batch.owner == "me"]
        assert running == [first.id, other.id]
        await worker.close()


async def test_a_tenant_without_a_run_gets_one_although_another_holds_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_module, "RUNS_MAX", 2)
    async with a_bench(tmp_path) as bench:
        worker = BatchWorker(bench.runtime)
        many = [await bench.add([ask("one")]) for _ in range(3)]
        worker.start()
        await reply_of(bench, 1)
        other = await bench.add([ask("other")], tenant="u")
        worker.wake()
        await reply_of(bench, 2)
        running = [batch.id for batch in await bench.store.open_batches() if batch.owner == "me"]
        assert running == [many[0].id, many[1].id, other.id]
        await worker.close()


async def test_expired_files_are_deleted_except_inputs_of_open_batches(tmp_path: Path) -> None:
    async with a_bench(tmp_path) as bench:
        bench.rig.script(answer())
        worker = BatchWorker(bench.runtime)
        done = await bench.add([ask("one")])
        worker.start()
        await until_status(bench, done.id, BatchStatus.COMPLETED)
        await worker.close()
        bench.now += 90 * 86_400
        bench.rig.script()
        held = await bench.add([ask("two")], expires_at=int(bench.now + 3600))
        again = BatchWorker(bench.runtime)
        again.start()
        await reply_of(bench, 1)
        for _ in range(1000):
            if await bench.store.file(done.input_file_id) is None:
                break
            await asyncio.sleep(0.001)
        await again.close()
        assert await bench.store.file(done.input_file_id) is None
        assert await bench.store.file(held.input_file_id) is not None
