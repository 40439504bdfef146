"""What settlement writes and releases on every way out, with real components and scripted deployments."""

from __future__ import annotations

import asyncio
import errno
import json
import threading
from pathlib import Path

import pytest

from gateway.billing.ledger import appender, writer
from gateway.core.errors import LedgerUnavailable
from gateway.providers.base import Fault, ProviderFailure
from tests.gateway.harness import (
    DONE,
    Client,
    a_rig,
    answer,
    chat,
    counted,
    cut,
    delta,
    in_time,
    last_event,
    settle,
    tenant,
)

STREAM = chat(stream=True)
NOT_RESUMED = {"classes": {"realtime": {"continue_cut_streams": False}}}
SURE = chat(temperature=0)


# Calls that come to their end


async def test_the_receipt_is_written_before_the_last_bytes_and_nothing_is_held_right_behind_them(
    tmp_path: Path,
) -> None:
    async with a_rig(tmp_path, tenants=[tenant(concurrency=1)]) as rig:
        first, second = Client(STREAM), Client(STREAM)
        rows_at_the_end: list[int] = []
        first.on_last = lambda: rows_at_the_end.append(len(rig.receipts()))
        serving = rig.begin(first)
        reply = await rig.reply()
        reply.slow_to_close = asyncio.Event()
        reply.say(delta("one"), DONE)
        await settle()
        assert first.whole and rows_at_the_end == [1]
        rig.script(delta("two"), DONE)
        assert (await rig.ask(second)).status == 200  # although the first one's connection is not free yet
        reply.slow_to_close.set()
        await in_time(serving)


async def test_the_reservation_is_settled_to_the_truth(tmp_path: Path) -> None:
    async with a_rig(tmp_path, tenants=[tenant(tokens="1000/1d", budget={"amount": "1", "per": "month"})]) as rig:
        rig.script(answer())  # 12 tokens
        reserved = 1000 - int((await rig.ask(chat(max_tokens=100))).headers["x-ratelimit-remaining-tokens"])
        assert reserved > 100
        await rig.components.settler.stop()
        left = int((await rig.ask(chat(max_tokens=100))).headers["x-ratelimit-remaining-tokens"])
        assert left == 1000 - 12 - reserved
        await rig.components.settler.stop()
        (account,) = (account for key, account in rig.storage._accounts.items() if "budget" in key)
        assert account.spent == 2 * (10 * 1000 + 2 * 2000)  # billionths: 10 tokens at 1 and 2 at 2 per million


async def test_an_answer_from_the_cache_that_costs_money_is_held_against_the_budget(tmp_path: Path) -> None:
    models = [{"name": "m", "deployments": ["a"], "cache_price": {"input": "0.5", "output": "1"}}]
    limits = tenant(requests="2/1d", budget={"amount": "1", "per": "total"})
    async with a_rig(tmp_path, models=models, tenants=[limits]) as rig:
        rig.script(answer())  # 10 tokens and 2
        assert [(await rig.ask(SURE)).status for _ in range(4)] == [200] * 4, "requests count those to servers"
        await rig.components.settler.stop()
        assert [receipt["cost"] for receipt in rig.receipts()] == ["0.000014", *["0.000007"] * 3]
        (account,) = (account for key, account in rig.storage._accounts.items() if "budget" in key)
        assert (account.spent, account.held) == (14_000 + 3 * 7_000, 0)
        account.spent = 10**9
        refused = await rig.ask(SURE)
        assert (refused.status, refused.json["error"]["code"]) == (429, "insufficient_quota")
        assert len(rig.receipts()) == 4


async def test_a_priced_answer_that_is_shared_and_fails_is_charged_nothing(tmp_path: Path) -> None:
    models = [{"name": "m", "deployments": ["a"], "cache_price": {"input": "0.5"}}]
    limits = tenant(budget={"amount": "1", "per": "total"})
    async with a_rig(tmp_path, models=models, tenants=[limits]) as rig:
        follower = Client(SURE)
        serving = [rig.begin(Client(SURE))]
        reply = await rig.reply()
        serving.append(rig.begin(follower))
        await settle()
        reply.say(ProviderFailure(Fault.REFUSED, "", status=400, body=b"{}"))
        (await rig.reply(1)).say(answer(), None)  # it asks for itself
        await in_time(asyncio.gather(*serving))
        await rig.components.settler.stop()
        (account,) = (account for key, account in rig.storage._accounts.items() if "budget" in key)
        assert (follower.status, account.spent, account.held) == (200, 14_000, 0)


async def test_nobody_is_refused_for_what_is_over_and_not_yet_settled(tmp_path: Path) -> None:
    async with a_rig(tmp_path, tenants=[tenant(tokens="150/1d")]) as rig:
        rig.script(answer())  # 12 tokens, of some 106 that are reserved
        assert [(await rig.ask(chat(max_tokens=100))).status for _ in range(3)] == [200, 200, 200]
        assert (await rig.ask(chat(max_tokens=140))).status == 429


async def test_the_truth_is_paid_when_the_receipt_is_durable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = threading.Event()
    monkeypatch.setattr(writer, "sync", lambda full, segment, folder: disk.wait(10))
    async with a_rig(tmp_path, tenants=[tenant(tokens="1000/1d", concurrency=1)]) as rig:
        rig.script(answer())
        assert (await rig.ask(chat(max_tokens=10))).status == 200, "the client waits for no disk"
        assert (await rig.ask(chat(max_tokens=10))).status == 200, "and no client for a slot"
        assert rig.storage.ended == []
        disk.set()
        await rig.components.settler.stop()
        assert len(rig.storage.ended) == 2


async def test_before_a_server_is_asked_a_row_says_so(tmp_path: Path) -> None:
    async with a_rig(tmp_path) as rig:
        serving = rig.begin(client := Client(chat(user="u")))
        reply = await rig.reply()
        (opened,) = rig.rows()
        assert (opened["kind"], opened["call_id"]) == ("opened", reply.call.id)
        reply.say(answer())
        await in_time(serving)
        _, receipt = rig.rows()
        assert receipt["kind"] == "receipt" and receipt["event_id"] != opened["event_id"]
        same = ("call_id", "tenant", "key_id", "end_user", "operation", "model_asked", "deployment", "latency_class")
        assert {name: opened.get(name) for name in same} == {name: receipt.get(name) for name in same}
        assert (opened["started"], opened["trace_id"]) == (receipt["started"], receipt["trace_id"])
        assert client.headers["x-request-id"] == opened["call_id"]


async def test_each_attempt_is_opened_and_one_receipt_closes_them(tmp_path: Path) -> None:
    async with a_rig(tmp_path) as rig:
        rig.servers["a"].script = rig.servers["b"].script = (cut(),)
        rig.servers["c"].script = (answer(),)
        assert (await rig.ask(chat())).status == 200
        assert [(row["kind"], row["deployment"]) for row in rig.rows()] == [
            ("opened", "a"), ("opened", "b"), ("opened", "c"), ("receipt", "c"),
        ]  # fmt: skip
        rig.servers["a"].record = json.dumps({"usage": counted(10, 4)}).encode()
        await rig.recovery.catch_up()
        in_vain = rig.rows()[4:]
        assert [(row["kind"], row["deployment"], row["attempt"]) for row in in_vain] == [
            ("unbilled", "a", 1), ("unbilled", "b", 2),
        ]  # fmt: skip
        assert [(row["exact"], row["input_uncached"], row["output"]) for row in in_vain] == [
            (True, 10, 4),
            (False, 0, 0),  # it keeps records, and has none
        ]
        call_id = rig.rows()[0]["call_id"]
        assert rig.servers["a"].asked_for == [call_id] and rig.servers["b"].asked_for[0] == f"{call_id}-2"


async def test_work_for_a_call_that_failed_at_its_only_deployment_is_recorded_and_not_billed(tmp_path: Path) -> None:
    async with a_rig(tmp_path, models=[{"name": "m", "deployments": ["a"]}]) as rig:
        rig.script(ProviderFailure(Fault.REFUSED, "a bug", status=500, body=b"{}"))
        rig.servers["a"].record = json.dumps({"usage": counted(10, 1)}).encode()
        assert (await rig.ask(chat())).status == 500
        await rig.recovery.catch_up()
        opened, receipt, unbilled = rig.rows()
        assert (opened["kind"], receipt["outcome"], receipt["deployment"]) == ("opened", "refused", None)
        assert (receipt["input_uncached"], receipt["output"], receipt["cost"]) == (0, 0, "0")
        assert (unbilled["kind"], unbilled["input_uncached"], unbilled["output"]) == ("unbilled", 10, 1)


async def test_what_can_not_be_opened_is_not_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> bool:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(appender, "preallocate", full)
    monkeypatch.setattr(writer, "PROBE_SECONDS", 0)
    async with a_rig(tmp_path, tenants=[tenant(concurrency=1)]) as rig:
        client = await rig.ask(chat())
        assert (client.status, client.json["error"]["code"]) == (503, "ledger_unavailable")
        assert rig.rows() == [] and rig.replies == [] and not rig.ledger.ok
        monkeypatch.undo()
        assert rig.ledger._prober is not None
        await in_time(rig.ledger._prober.join())
        rig.script(answer())
        assert (await rig.ask(chat())).status == 200


# Servers that count nonsense


@pytest.mark.parametrize("stream", [False, True])
async def test_implausible_usage_is_estimated_marked_counted_and_logged_once(
    tmp_path: Path, stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async with a_rig(tmp_path, tenants=[tenant(tokens="100000/1d", budget={"amount": "1", "per": "month"})]) as rig:
        usage = counted(10, 18446744073709551615)
        said = (delta("hi and"), delta(" ho"), b'data: {"usage":%b}\n\n' % json.dumps(usage).encode(), DONE)
        rig.script(*(said if stream else (answer("hi and ho", usage=usage),)))
        for _ in range(3):
            assert (await rig.ask(chat(stream=stream, seed=None))).status == 200
        rig.script(answer())
        assert (await rig.ask(chat())).status == 200
        await rig.components.settler.stop()
        *lied, honest = rig.receipts()
        prompt = rig.last_call.prompt_tokens_estimate
        for receipt in lied:
            assert (receipt["source"], receipt["exact"], receipt["outcome"]) == ("estimate", False, "complete")
            assert (receipt["input_uncached"], receipt["output"]) == (prompt, 3)
            assert receipt["implausible"] == f"malformed counts: {json.dumps(usage)}"
        assert honest["exact"] and "implausible" not in honest
        assert sum(server.failures.implausible_usages for server in rig.fleet) == 3
        lines = [record.message for record in caplog.records if "implausible" in record.message]
        assert len(lines) == len({receipt["deployment"] for receipt in lied}), "one line for each deployment"
        (account,) = (account for key, account in rig.storage._accounts.items() if "budget" in key)
        assert account.spent == 3 * (prompt * 1000 + 3 * 2000) + 10 * 1000 + 2 * 2000


async def test_nothing_learns_from_implausible_usage(tmp_path: Path) -> None:
    deployments = [{"name": "a", "base_url": "http://a.invalid/v1", "model": "m"}]
    models = [{"name": "m", "deployments": ["a"]}]
    long = {"messages": [{"role": "user", "content": "hello " * 500}]}
    async with a_rig(tmp_path, deployments=deployments, models=models) as rig:
        usage = {**counted(90_000, 1), "prompt_tokens_details": {"cached_tokens": 80_000}}
        rig.script(answer(usage=usage))
        (server,) = rig.fleet
        before = (server.estimate.tokens_scale, server.token_calibration.tokens_per_block, server.cache.capacity_tokens)
        client = await rig.ask(chat(**long))
        assert client.status == 200
        assert (
            server.estimate.tokens_scale,
            server.token_calibration.tokens_per_block,
            server.cache.capacity_tokens,
        ) == before
        assert not server.estimate.reports_cached
        (receipt,) = rig.receipts()
        assert receipt["implausible"].startswith("a prompt of 90000 tokens is above ")


async def test_an_implausible_record_of_a_call_that_ended_early_is_not_believed(tmp_path: Path) -> None:
    async with a_rig(tmp_path) as rig:
        for server in rig.servers.values():
            server.record = json.dumps({"usage": counted(10**12, 5)}).encode()
        client = Client(STREAM)
        serving = rig.begin(client)
        (await rig.reply()).say(delta("one"))
        await settle()
        client.leave()
        await in_time(serving)
        (receipt,) = rig.receipts()
        assert (receipt["input_uncached"], receipt["output"]) == (rig.last_call.prompt_tokens_estimate, 1)
        assert receipt["implausible"].startswith("a prompt of 1000000000000 tokens")


# A gateway that stops


@pytest.mark.parametrize("begun", [False, True])
async def test_a_call_cut_off_by_the_shutdown_is_told_and_billed(tmp_path: Path, begun: bool) -> None:
    async with a_rig(tmp_path, tenants=[tenant(concurrency=1)]) as rig:
        client = Client(STREAM)
        serving = rig.begin(client)
        reply = await rig.reply()
        if begun:
            reply.say(delta("one"))
        await settle()
        serving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await in_time(serving)
        assert client.whole and DONE not in client.content
        assert client.status == (200 if begun else 503)
        assert last_event(client)["error"]["code"] == "overloaded"
        assert len(rig.receipts()) == 1


async def test_a_shutdown_while_a_call_settles_loses_no_receipt(tmp_path: Path) -> None:
    async with a_rig(tmp_path, tenants=[tenant(concurrency=1)], **NOT_RESUMED) as rig:
        serving = rig.begin(Client(STREAM))
        reply = await rig.reply()
        server = next(server for server in rig.servers.values() if server.replies)
        server.record_may_come = asyncio.Event()
        reply.say(delta("one"), cut())
        await in_time(server.asked_for_records.wait())
        serving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await in_time(serving)
        assert len(rig.receipts()) == 1


# A ledger that cannot be written


async def test_without_a_ledger_nothing_is_asked_of_a_server(tmp_path: Path) -> None:
    async with a_rig(tmp_path) as rig:
        rig.ledger._fault = "the disk is full"
        client = await rig.ask(SURE)
        assert client.status == 503 and client.json["error"]["code"] == LedgerUnavailable.code
        assert rig.replies == []


async def test_who_could_not_be_billed_does_not_get_the_end_of_the_answer(tmp_path: Path) -> None:
    async with a_rig(tmp_path, tenants=[tenant(concurrency=1, tokens="1k/1m")]) as rig:
        serving = rig.begin(client := Client(STREAM))
        reply = await rig.reply()
        reply.say(delta("one"))
        await settle()
        rig.ledger.fault_ahead = True
        reply.say(DONE)
        await in_time(serving)
        assert client.whole and DONE not in client.content
        assert last_event(client)["error"]["code"] == LedgerUnavailable.code
        assert rig.receipts() == []


async def test_a_failed_call_is_told_its_own_failure_although_the_ledger_fails_too(tmp_path: Path) -> None:
    async with a_rig(tmp_path, tenants=[tenant(concurrency=1)]) as rig:
        rig.ledger.fault_ahead = True
        rig.script(cut())
        assert (await rig.ask(STREAM)).json["error"]["code"] == "upstream_error"
