import asyncio
import itertools
from pathlib import Path

import msgspec
import pytest

from gateway.batches import run as run_module
from gateway.batches.records import BatchStatus
from gateway.batches.run import BatchRun
from gateway.providers.base import Fault, ProviderFailure
from tests.gateway.batches.bench import a_bench, ask, reply_of, run_to_end
from tests.gateway.harness import answer, chat, in_time, tenant


async def test_lines_run_as_calls_of_the_batch_latency_class(tmp_path: Path) -> None:
    async with a_bench(tmp_path) as bench:
        bench.rig.script(answer("hi"))
        batch = await run_to_end(bench, [ask("one"), ask("two"), ask("three")])
        assert (batch.status, batch.completed, batch.failed, batch.total) == (BatchStatus.COMPLETED, 3, 0, 3)
        assert (batch.tokens.input, batch.tokens.output) == (30, 6)
        output = await bench.lines(batch.id, "output")
        assert [row["response"]["status_code"] for row in output.values()] == [200] * 3
        receipts = bench.rig.receipts()
        assert {row["call_id"] for row in receipts} == {row["response"]["request_id"] for row in output.values()}
        assert {(row["latency_class"], row["key_id"], row["tenant"]) for row in receipts} == {("batch", "dev", "t")}
        calls = [record.call for record in bench.rig.telemetry.records if record.call]
        assert {call.class_name for call in calls} == {"batch"}
        assert all(call.latency_class.max_wait == call.latency_class.total for call in calls)
        assert all(record.timings.phases for record in bench.rig.telemetry.records)


async def test_lines_with_equal_prefixes_follow_each_other(tmp_path: Path) -> None:
    families = [letter * 600 for letter in "abc"]
    bodies = [ask(families[number % 3] + str(number)) for number in range(9)]
    async with a_bench(tmp_path, batches={"concurrency": 1}) as bench:
        bench.rig.script(answer())
        await run_to_end(bench, bodies)
        sent = [
            bytes(record.call.fields["messages"]) for record in bench.rig.telemetry.records if record.call is not None
        ]
        first_letters = [content.split(b'"content":')[1].strip(b' "')[:1] for content in sent]
        changes = sum(one != other for one, other in itertools.pairwise(first_letters))
        assert (len(first_letters), changes) == (9, 2)


async def test_a_failed_attempt_is_retried_and_only_the_answer_is_billed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_module, "BACKOFF_FIRST_SECONDS", 0.0)
    async with a_bench(tmp_path, batches={"attempts": 2}) as bench:
        for server in bench.rig.servers.values():
            server.script = (ProviderFailure(Fault.CUT, "cut"),)
        batch = await bench.add([ask("one")])
        run = await bench.claim(batch)
        live = asyncio.create_task(run.run())
        for _ in range(1000):
            if bench.rig.telemetry.records:
                break
            await asyncio.sleep(0.001)
        bench.rig.script(answer())
        await in_time(live)
        assert (run.batch.completed, run.batch.failed) == (1, 0)
        assert [row["outcome"] for row in bench.rig.receipts()] == ["complete"]


async def test_a_line_that_fails_is_in_the_error_file_with_its_reply(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_module, "BACKOFF_FIRST_SECONDS", 0.0)
    async with a_bench(tmp_path, batches={"attempts": 1}) as bench:
        bench.rig.script(ProviderFailure(Fault.CONNECT, "no"))
        batch = await run_to_end(bench, [ask("one"), chat(messages="none")])
        errors = await bench.lines(batch.id, "error")
        assert (batch.status, batch.completed, batch.failed) == (BatchStatus.COMPLETED, 0, 2)
        assert errors["c-1"]["response"]["status_code"] == 502
        assert errors["c-2"]["response"]["body"]["error"]["param"] == "messages"
        assert batch.output_file_id is None


async def test_waiting_for_a_limit_does_not_count_as_a_failed_attempt(tmp_path: Path) -> None:
    tenants = [tenant(requests={"amount": 1, "period": 0.2})]
    async with a_bench(tmp_path, tenants=tenants, batches={"attempts": 1}) as bench:
        bench.rig.script(answer())
        batch = await run_to_end(bench, [ask("one"), ask("two"), ask("three")])
        assert (batch.completed, batch.failed) == (3, 0)


async def test_a_draining_gateway_finishes_lines_in_flight_and_leaves_the_rest(tmp_path: Path) -> None:
    async with a_bench(tmp_path, batches={"concurrency": 1}) as bench:
        batch = await bench.add([ask("one"), ask("two")])
        run = await bench.claim(batch)
        live = asyncio.create_task(run.run())
        reply = await reply_of(bench, 0)
        run.drain()
        reply.say(answer())
        await in_time(live)
        assert len(await bench.store.finished_lines(batch.id)) == 1
        assert await bench.status(batch.id) is BatchStatus.IN_PROGRESS
        bench.rig.script(answer())
        again = BatchRun(bench.runtime, run.batch)
        await in_time(again.run())
        assert (again.batch.status, again.batch.completed) == (BatchStatus.COMPLETED, 2)
        assert len(bench.rig.receipts()) == 2


async def test_a_cancelled_line_leaves_no_result_and_is_called_again(tmp_path: Path) -> None:
    async with a_bench(tmp_path) as bench:
        batch = await bench.add([ask("one")])
        run = await bench.claim(batch)
        live = asyncio.create_task(run.run())
        await reply_of(bench, 0)
        live.cancel()
        await asyncio.wait([live])
        assert live.cancelled()
        assert (await bench.store.finished_lines(batch.id), bench.rig.receipts()) == ([], [])
        bench.rig.script(answer())
        await in_time(BatchRun(bench.runtime, run.batch).run())
        assert await bench.status(batch.id) is BatchStatus.COMPLETED


async def test_lines_in_flight_of_a_cancelled_batch_are_billed_for_the_tokens_they_used(tmp_path: Path) -> None:
    async with a_bench(tmp_path) as bench:
        batch = await bench.add([ask("one")])
        run = await bench.claim(batch)
        live = asyncio.create_task(run.run())
        await reply_of(bench, 0)
        await bench.store.update(batch.id, lambda each: each.cancelling(bench.now))
        run.stop(BatchStatus.CANCELLED)
        await in_time(live)
        errors = await bench.lines(batch.id, "error")
        assert (run.batch.status, run.batch.failed) == (BatchStatus.CANCELLED, 1)
        assert errors["c-1"]["error"]["code"] == "batch_cancelled"
        assert len(bench.rig.receipts()) == 1


async def test_a_batch_expires_when_its_completion_window_ends(tmp_path: Path) -> None:
    async with a_bench(tmp_path) as bench:
        bench.now += 10_000
        batch = await run_to_end(bench, [ask("one"), ask("two")])
        assert (batch.status, batch.failed, batch.total) == (BatchStatus.EXPIRED, 2, 2)
        assert {row["error"]["code"] for row in (await bench.lines(batch.id, "error")).values()} == {"batch_expired"}


async def test_a_batch_fails_if_its_key_was_revoked(tmp_path: Path) -> None:
    async with a_bench(tmp_path) as bench:
        batch = await bench.add([ask("one")])
        await bench.store.update(batch.id, lambda each: msgspec.structs.replace(each, key_id="unknown"))
        run = await bench.claim(batch)
        await in_time(run.run())
        assert (run.batch.status, run.batch.errors[0].code) == (BatchStatus.FAILED, "invalid_api_key")


async def test_lines_get_401_once_if_the_key_is_revoked_while_no_gateway_runs_the_batch(tmp_path: Path) -> None:
    async with a_bench(tmp_path) as bench:
        batch = await bench.add([ask("one"), ask("two")])
        await bench.store.update(
            batch.id,
            lambda each: msgspec.structs.replace(each.entered(BatchStatus.IN_PROGRESS, 0.0, total=2), key_id="unknown"),
        )
        run = await bench.claim(batch)
        await in_time(run.run())
        assert (run.batch.status, run.batch.total, run.batch.failed) == (BatchStatus.COMPLETED, 2, 2)
        errors = await bench.lines(batch.id, "error")
        assert {row["response"]["status_code"] for row in errors.values()} == {401}
        assert bench.rig.replies == []


@pytest.mark.parametrize("when", ["before it is read again", "between two lines"])
async def test_a_deleted_input_file_fails_the_batch_and_keeps_the_answers(tmp_path: Path, when: str) -> None:
    async with a_bench(tmp_path, batches={"concurrency": 1}) as bench:
        batch = await bench.add([ask("one"), ask("two"), ask("three")])
        file = await bench.store.file(batch.input_file_id)
        assert file is not None
        run = await bench.claim(batch)
        live = asyncio.create_task(run.run())
        reply = await reply_of(bench, 0)
        if when == "between two lines":
            await bench.store.delete_file(file)
            reply.say(answer())
        else:
            run.drain()
            reply.say(answer())
            await in_time(live)
            await bench.store.delete_file(file)
            run = BatchRun(bench.runtime, run.batch)
            live = asyncio.create_task(run.run())
        await in_time(live)
        ended = run.batch
        assert (ended.status, ended.errors[0].code) == (BatchStatus.FAILED, "invalid_file")
        assert (ended.total, ended.completed, ended.failed) == (3, 1, 2)
        assert list(await bench.lines(batch.id, "output")) == ["c-1"]
        assert len(bench.rig.receipts()) == 1
