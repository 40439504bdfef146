"""What settlement bills and releases if the client leaves."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path

import pytest

from gateway.endpoints import wire
from gateway.types import Outcome
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
    outcomes,
    settle,
    tenant,
)

STREAM = chat(stream=True)
NOT_RESUMED = {"classes": {"realtime": {"continue_cut_streams": False}}}
CLOCKS_APART_NS = 1_000_000  # a call's own time and the system's, at most


async def test_a_client_that_leaves_the_queue_is_owed_and_owes_nothing(tmp_path: Path) -> None:
    async with a_rig(tmp_path, tenants=[tenant(concurrency=9)]) as rig:
        before = [rig.begin(Client(STREAM)) for _ in range(4)]
        await rig.reply(3)
        client = Client(STREAM)
        serving = rig.begin(client)
        await settle()
        client.leave()
        await in_time(serving)
        for reply in rig.replies:
            reply.say(DONE)
        await asyncio.gather(*before)
        assert len(rig.replies) == len(rig.receipts()) == 4
        assert rig.telemetry.records[0].outcome is Outcome.CLIENT_GONE


@pytest.mark.parametrize("said", [[], [delta("one"), delta("two")]])
async def test_a_client_that_leaves_ends_the_servers_work_and_pays_for_it(tmp_path: Path, said: list[bytes]) -> None:
    async with a_rig(tmp_path, tenants=[tenant(concurrency=1)]) as rig:
        client = Client(STREAM)
        serving = rig.begin(client)
        reply = await rig.reply()
        reply.say(*said)
        await settle()
        client.leave()
        await in_time(serving)
        assert reply.closed
        (receipt,) = rig.receipts()
        assert receipt["outcome"] == "client_gone" and receipt["output"] == len(said)
        assert receipt["attempts"][0]["outcome"] == "client_gone"


@pytest.mark.parametrize("said", [[], [delta("")]])
@pytest.mark.parametrize("tokenized", [None, 123, 10**9])
async def test_a_prompt_whose_client_leaves_before_the_first_text_is_billed_if_the_server_keeps_no_records(
    tmp_path: Path, tokenized: int | None, said: list[bytes]
) -> None:
    async with a_rig(tmp_path, tenants=[tenant(tokens="1000/1d")]) as rig:
        for server in rig.servers.values():
            server.has_usage_records, server.prompt_tokens = False, tokenized
        client = Client(STREAM)
        serving = rig.begin(client)
        (await rig.reply()).say(*said)
        await settle()
        client.leave()
        await in_time(serving)
        await rig.components.settler.stop()
        (receipt,) = rig.receipts()
        prompt = 123 if tokenized == 123 else rig.last_call.prompt_tokens_estimate
        assert (receipt["outcome"], receipt["source"]) == ("client_gone", "estimate")
        assert (receipt["input_uncached"], receipt["output"]) == (prompt, 0)
        assert receipt["cost"] == f"0.{prompt:06}", "at the price of the deployment that had the prompt"
        rig.script(answer())
        left = int((await rig.ask(chat(max_tokens=1))).headers["x-ratelimit-remaining-tokens"])
        assert left < 1000 - prompt, "and it counts towards the tenant's limits"
        assert ("implausible" in receipt) == (tokenized == 10**9)


async def test_a_prompt_is_not_billed_if_its_server_says_that_it_did_not_get_it(tmp_path: Path) -> None:
    async with a_rig(tmp_path) as rig:
        client = Client(STREAM)
        serving = rig.begin(client)
        await rig.reply()
        client.leave()
        await in_time(serving)
        (receipt,) = rig.receipts()
        assert (receipt["input_uncached"], receipt["cost"]) == (0, "0")


async def test_a_server_that_fails_before_any_text_has_its_prompt_not_billed(tmp_path: Path) -> None:
    async with a_rig(tmp_path) as rig:
        for server in rig.servers.values():
            server.has_usage_records = False
        rig.script(cut())
        assert (await rig.ask(STREAM)).status == 502
        (receipt,) = rig.receipts()
        assert (receipt["input_uncached"], receipt["cost"]) == (0, "0")


async def test_what_ended_early_is_billed_by_the_engines_own_count(tmp_path: Path) -> None:
    async with a_rig(tmp_path) as rig:
        for server in rig.servers.values():
            server.record = json.dumps({"usage": counted(10, 5)}).encode()
        client = Client(STREAM)
        serving = rig.begin(client)
        (await rig.reply()).say(delta("one"))
        await settle()
        client.leave()
        await in_time(serving)
        assert (rig.receipts()[0]["output"], rig.receipts()[0]["exact"]) == (5, True)


async def test_without_a_record_the_prompt_is_what_the_servers_tokenizer_says(tmp_path: Path) -> None:
    async with a_rig(tmp_path) as rig:
        for server in rig.servers.values():
            server.prompt_tokens = 123
        client = Client(STREAM)
        serving = rig.begin(client)
        (await rig.reply()).say(delta("one"), delta("two"))
        await settle()
        client.leave()
        await in_time(serving)
        (receipt,) = rig.receipts()
        assert (receipt["input_uncached"], receipt["output"], receipt["source"]) == (123, 2, "estimate")


async def test_a_client_that_leaves_while_its_failure_is_settled_is_billed_as_well(tmp_path: Path) -> None:
    async with a_rig(tmp_path, tenants=[tenant(concurrency=1)], **NOT_RESUMED) as rig:
        client = Client(STREAM)
        serving = rig.begin(client)
        reply = await rig.reply()
        server = next(server for server in rig.servers.values() if server.replies)
        server.record_may_come = asyncio.Event()
        server.record = json.dumps({"usage": counted(10, 5)}).encode()
        reply.say(delta("one"), cut())
        await in_time(server.asked_for_records.wait())
        client.leave()
        await settle()
        server.record_may_come.set()
        await in_time(serving)
        (receipt,) = rig.receipts()
        assert (receipt["outcome"], receipt["output"], receipt["exact"]) == ("upstream_cut", 5, True)


async def test_waiting_for_the_engines_count_is_no_time_of_the_gateways_own(tmp_path: Path) -> None:
    async with a_rig(tmp_path) as rig:
        client = Client(STREAM)
        serving = rig.begin(client)
        (await rig.reply()).say(delta("one"))
        server = next(server for server in rig.servers.values() if server.replies)
        server.record_may_come = asyncio.Event()
        await settle()
        client.leave()
        await in_time(server.asked_for_records.wait())
        await asyncio.sleep(10 * CLOCKS_APART_NS / 1e9)
        told_ns = time.time_ns()
        server.record_may_come.set()
        await in_time(serving)
        entered = rig.telemetry.records[0].timings.phases
        assert [name for name, _ in entered][-2:] == ["chat", "settle"]
        assert entered[-1][1] >= told_ns - CLOCKS_APART_NS


async def test_a_client_that_takes_nothing_is_taken_for_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "STALL_SECONDS", 0.02)
    async with a_rig(tmp_path) as rig:
        client = Client(STREAM)
        client.takes = asyncio.Event()
        serving = rig.begin(client)
        reply = await rig.reply()
        reply.say(delta("one"))
        await in_time(serving)
        assert reply.closed and outcomes(rig) == ["client_gone"]
