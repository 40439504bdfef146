"""Every way in which a request can end, against the real house with scripted servers (`tests.gateway.house`).

`a_rig` checks at the end of each test that nothing is held and nothing runs any more.
"""

from __future__ import annotations

import asyncio
import errno
import json
import threading
from pathlib import Path
from typing import Any

import pytest

from gateway import replies
from gateway.errors import LedgerUnavailable
from gateway.ledger import appender, writer
from gateway.providers.base import Fault, ProviderFailure
from gateway.types import Operation, Outcome
from tests.gateway.house import (
    DONE,
    Client,
    Rig,
    a_rig,
    answer,
    chat,
    counted,
    cut,
    delta,
    in_time,
    policy_of,
    settle,
    tenant,
    usage_frame,
)

STREAM = chat(stream=True)
SURE = chat(temperature=0)
SURE_STREAM = chat(temperature=0, stream=True)


def last_event(client: Client) -> Any:
    return json.loads(client.content.removesuffix(b"\n\n").rpartition(b"data: ")[2])


def outcomes(rig: Rig) -> list[str]:
    return [receipt["outcome"] for receipt in rig.receipts()]


# Answers that come to their end


async def test_a_stream_is_passed_on_byte_for_byte(tmp_path: Path) -> None:
    async with a_rig(tmp_path) as rig:
        rig.script(b": ping\n\n", delta("one"), delta("two"), usage_frame(10, 2), DONE)
        client = await rig.ask(chat(stream=True, stream_options={"include_usage": True}))
        assert client.status == 200 and client.whole
        assert client.headers["content-type"].startswith("text/event-stream")
        assert client.content == b"".join([b": ping\n\n", delta("one"), delta("two"), usage_frame(10, 2), DONE])
        (receipt,) = rig.receipts()
        assert receipt["outcome"] == "complete" and receipt["exact"] and receipt["output"] == 2
        assert client.headers["x-request-id"] == receipt["call_id"]
        assert client.headers["x-warmpath-deployment"] == receipt["deployment"]


async def test_usage_that_was_not_asked_for_is_metered_and_left_out(tmp_path: Path) -> None:
    async with a_rig(tmp_path) as rig:
        rig.script(delta("one"), usage_frame(10, 7), DONE)
        client = await rig.ask(STREAM)
        assert client.content == delta("one") + DONE
        assert rig.receipts()[0]["output"] == 7


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


async def test_the_end_of_the_reply_is_not_taken_for_the_clients_leaving(tmp_path: Path) -> None:
    async with a_rig(tmp_path) as rig:
        serving = rig.begin(Client(STREAM))
        reply = await rig.reply()
        reply.slow_to_close = asyncio.Event()
        reply.say(DONE)
        await settle()
        assert not serving.done()
        reply.slow_to_close.set()
        await in_time(serving)
        assert not serving.cancelled() and rig.telemetry.records[0].outcome is Outcome.COMPLETE


async def test_a_json_answer_has_its_length(tmp_path: Path) -> None:
    async with a_rig(tmp_path) as rig:
        rig.script(answer())
        client = await rig.ask(chat())
        assert (client.status, client.content, client.headers["content-type"]) == (200, answer(), "application/json")
        assert client.headers["content-length"] == str(len(answer()))
        assert outcomes(rig) == ["complete"]


async def test_embeddings(tmp_path: Path) -> None:
    async with a_rig(tmp_path) as rig:
        vectors = json.dumps({"data": [], "usage": {"prompt_tokens": 3, "total_tokens": 3}}).encode()
        rig.script(vectors)
        client = await rig.ask(b'{"model": "m", "input": "text", "stream": true}', Operation.EMBEDDING)
        assert (client.status, client.content) == (200, vectors)
        (receipt,) = rig.receipts()
        assert (receipt["input_uncached"], receipt["output"], receipt["cost"]) == (3, 0, "0.000003")
        assert (receipt["operation"], receipt["outcome"], receipt["exact"]) == ("embeddings", "complete", True)


async def test_the_reservation_is_settled_to_the_truth(tmp_path: Path) -> None:
    async with a_rig(tmp_path, tenants=[tenant(tokens="1000/1d", budget={"amount": "1", "per": "month"})]) as rig:
        rig.script(answer())  # 12 tokens
        reserved = 1000 - int((await rig.ask(chat(max_tokens=100))).headers["x-ratelimit-remaining-tokens"])
        assert reserved > 100
        await rig.house.settler.stop()
        left = int((await rig.ask(chat(max_tokens=100))).headers["x-ratelimit-remaining-tokens"])
        assert left == 1000 - 12 - reserved
        await rig.house.settler.stop()
        (account,) = (account for key, account in rig.storage._accounts.items() if "budget" in key)
        assert account.spent == 2 * (10 * 1000 + 2 * 2000)  # billionths: 10 tokens at 1 and 2 at 2 per million


async def test_an_answer_from_the_cache_that_costs_money_is_held_against_the_budget(tmp_path: Path) -> None:
    models = [{"name": "m", "deployments": ["a"], "cache_price": {"input": "0.5", "output": "1"}}]
    limits = tenant(requests="2/1d", budget={"amount": "1", "per": "total"})
    async with a_rig(tmp_path, models=models, tenants=[limits]) as rig:
        rig.script(answer())  # 10 tokens and 2
        assert [(await rig.ask(SURE)).status for _ in range(4)] == [200] * 4, "requests count those to servers"
        await rig.house.settler.stop()
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
        await rig.house.settler.stop()
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
        assert (await rig.ask(chat(max_tokens=10))).status == 200, "and nobody for its place"
        assert rig.storage.ended == []
        disk.set()
        await rig.house.settler.stop()
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
        assert {name: opened[name] for name in same} == {name: receipt[name] for name in same}
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
            (False, 0, 0),
        ]
        call_id = rig.rows()[0]["call_id"]
        assert rig.servers["a"].asked_for == [call_id] and rig.servers["b"].asked_for[0] == f"{call_id}-2"


async def test_what_can_not_be_opened_is_not_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> bool:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(appender, "take_room", full)
    monkeypatch.setattr(writer, "PROBE_SECONDS", 0)
    async with a_rig(tmp_path, tenants=[tenant(concurrency=1)]) as rig:
        client = await rig.ask(chat())
        assert (client.status, client.json["error"]["code"]) == (503, "ledger_unavailable")
        assert rig.rows() == [] and rig.replies == [] and not rig.ledger.ok
        monkeypatch.undo()
        assert rig.ledger._prober is not None
        await in_time(rig.ledger._prober)
        rig.script(answer())
        assert (await rig.ask(chat())).status == 200


# Refusals, before any server is asked


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        (b"", 400, None),
        (b"[]", 400, None),
        (b'{"model": "m", "messages": "\xff"}', 400, None),
        (b"{" * 9000, 400, None),
        (chat(max_tokens="many"), 400, "max_tokens"),
        (chat(max_tokens=2**31), 400, "max_tokens"),
        (chat(model="nobody"), 404, "model"),
        (chat(x="x" * 10_000), 413, None),
    ],
)
async def test_what_can_not_be_served_is_refused_by_name(
    tmp_path: Path, body: bytes, status: int, param: str | None
) -> None:
    async with a_rig(tmp_path) as rig:
        client = await rig.ask(body)
        error = client.json["error"]
        assert (client.status, error["param"]) == (status, param)
        assert error.keys() == {"message", "type", "param", "code"}
        assert client.headers["x-should-retry"] == "false" and client.headers["x-request-id"]
        assert rig.replies == [] and rig.receipts() == []


async def test_content_parts_of_no_known_form_are_left_to_the_server(tmp_path: Path) -> None:
    async with a_rig(tmp_path) as rig:
        rig.script(answer())
        client = await rig.ask(json.dumps({"model": "m", "messages": [{"role": "user", "content": ["text"]}]}).encode())
        assert client.status == 200


async def test_a_wrong_key_is_refused_before_the_body_is_read(tmp_path: Path) -> None:
    async with a_rig(tmp_path) as rig:
        client = await rig.ask(Client([None], key="wp-dev-wrong"))
        assert client.status == 401


async def test_a_limit_refuses_and_says_when_to_come_back(tmp_path: Path) -> None:
    async with a_rig(tmp_path, tenants=[tenant(requests="1/1m")]) as rig:
        rig.script(answer())
        assert (await rig.ask(chat())).headers["x-ratelimit-remaining-requests"] == "0"
        client = await rig.ask(chat())
        assert client.status == 429 and client.headers["x-should-retry"] == "true"
        assert int(client.headers["retry-after-ms"]) > 0
        assert [row["kind"] for row in rig.rows()] == ["opened", "receipt"]  # of the first one; a refusal leaves none


async def test_a_call_that_no_server_has_a_place_for_is_turned_away(tmp_path: Path) -> None:
    async with a_rig(tmp_path, classes={"realtime": {"max_queue": 0}}) as rig:
        waiting = [rig.begin(Client(STREAM)) for _ in range(4)]
        await rig.reply(3)
        client = await rig.ask(STREAM)
        assert client.status == 503 and client.json["error"]["code"] == "overloaded"
        for reply in rig.replies:
            reply.say(DONE)
        await asyncio.gather(*waiting)
        assert len(rig.receipts()) == 4


# The body


async def test_a_body_that_does_not_arrive_ends_the_connection(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replies, "STALL_SECONDS", 0.02)
    async with a_rig(tmp_path) as rig:
        for begun in ([b'{"model":', None], [None]):
            client = await rig.ask(Client(begun))
            assert client.status == 408 and client.json["error"]["code"] == "request_timeout"
            assert client.headers["connection"] == "close"


async def test_a_client_that_leaves_within_its_body_is_not_answered(tmp_path: Path) -> None:
    async with a_rig(tmp_path) as rig:
        client = Client([b'{"model":', None])
        serving = rig.begin(client)
        await settle()
        client.leave()
        await in_time(serving)
        assert client.status == 0
        assert rig.telemetry.records[0].status == 499 and rig.telemetry.records[0].outcome is Outcome.CLIENT_GONE


async def test_a_body_over_the_cap_is_read_to_its_end_so_that_its_sender_reads_the_refusal(tmp_path: Path) -> None:
    async with a_rig(tmp_path) as rig:
        for headers in ([], [(b"content-length", b"20000")]):
            client = Client([b"x" * 5000] * 4, headers=headers)
            assert (await rig.ask(client)).status == 413
            assert client._body == []


async def test_who_asks_before_sending_too_much_is_refused_at_once(tmp_path: Path) -> None:
    async with a_rig(tmp_path) as rig:
        client = Client([b"x" * 20_000], headers=[(b"content-length", b"20000"), (b"expect", b"100-continue")])
        assert (await rig.ask(client)).status == 413
        assert client._body != []


# Servers that fail


async def test_failover_until_the_first_chunk_and_one_receipt_for_all_attempts(tmp_path: Path) -> None:
    async with a_rig(tmp_path) as rig:
        for name in ("a", "b"):
            rig.servers[name].script = (cut(),)
        rig.servers["c"].script = (delta("from c"), DONE)
        client = await rig.ask(STREAM)
        assert client.status == 200 and client.headers["x-warmpath-deployment"] == "c"
        (receipt,) = rig.receipts()
        assert [attempt["outcome"] for attempt in receipt["attempts"]] == ["cut", "cut", "ok"]
        assert receipt["model_served"] == "served-by-c"


async def test_when_nobody_answers_the_attempts_are_told(tmp_path: Path) -> None:
    async with a_rig(tmp_path) as rig:
        rig.script(ProviderFailure(Fault.CONNECT, "refused"))
        client = await rig.ask(STREAM)
        assert client.status == 502
        assert [attempt["outcome"] for attempt in client.json["error"]["attempts"]] == ["connect_error"] * 4
        (receipt,) = rig.receipts()
        assert (receipt["outcome"], receipt["cost"]) == ("refused", "0")


@pytest.mark.parametrize("failure", [cut(), None, b'data: {"error": {"message": "out of memory"}}\n\n'])
async def test_a_failure_after_the_first_byte_is_told_in_the_stream(
    tmp_path: Path, failure: bytes | Exception | None
) -> None:
    async with a_rig(tmp_path) as rig:
        rig.script(delta("one"), failure)
        client = await rig.ask(STREAM)
        assert client.status == 200 and client.whole and DONE not in client.content
        assert client.content.startswith(delta("one"))
        assert last_event(client)["error"]["code"] == "upstream_cut"
        assert outcomes(rig) == ["upstream_cut"]


@pytest.mark.parametrize("body", [b'{"choices": [', b'{"error": {"message": "no"}}', b'{"choices": 7}'])
async def test_a_json_answer_that_is_none_is_not_passed_on(tmp_path: Path, body: bytes) -> None:
    async with a_rig(tmp_path) as rig:
        rig.script(body, None)
        client = await rig.ask(chat())
        assert client.status == 502 and client.json["error"]["code"] == "upstream_cut"
        assert outcomes(rig) == ["upstream_cut"]


async def test_a_server_that_says_nothing_for_too_long(tmp_path: Path) -> None:
    classes = {"realtime": {"inter_token": "0.02s"}}
    async with a_rig(tmp_path, classes=classes) as rig:
        rig.script(delta("one"))
        client = await rig.ask(STREAM)
        assert last_event(client)["error"]["code"] == "upstream_cut"
        assert outcomes(rig) == ["timeout"]
        assert rig.receipts()[0]["attempts"][0]["outcome"] == "timeout"


async def test_the_servers_own_refusal_is_the_clients(tmp_path: Path) -> None:
    async with a_rig(tmp_path) as rig:
        words = b'{"error": {"message": "too long"}}'
        rig.script(ProviderFailure(Fault.REFUSED, "", status=422, body=words))
        client = await rig.ask(chat())
        assert (client.status, client.content) == (422, words)
        assert len(rig.replies) == 1  # nobody else was asked


async def test_a_page_of_the_servers_is_not_shown_as_ours(tmp_path: Path) -> None:
    async with a_rig(tmp_path) as rig:
        page = b"<script>alert(1)</script>"
        rig.script(ProviderFailure(Fault.REFUSED, "", status=400, body=page, content_type="text/html\r\nx: y"))
        client = await rig.ask(chat())
        assert (client.status, client.headers["content-type"]) == (400, "application/json")
        assert page.decode() in client.json["error"]["message"]


async def test_a_bug_leaves_no_trace_with_the_client_and_one_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with a_rig(tmp_path, tenants=[tenant(concurrency=1)]) as rig:
        rig.script(ZeroDivisionError("a bug"))
        client = await rig.ask(STREAM)
        assert client.status == 500 and client.json["error"]["code"] == "internal_error"
        assert "a bug" not in client.content.decode() and "a bug" in caplog.text
        assert rig.receipts()[0]["attempts"][0]["outcome"] == "given_up"


# Clients that leave


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
    async with a_rig(tmp_path, tenants=[tenant(concurrency=1)]) as rig:
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


async def test_a_client_that_takes_nothing_is_taken_for_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replies, "STALL_SECONDS", 0.02)
    async with a_rig(tmp_path) as rig:
        client = Client(STREAM)
        client.takes = asyncio.Event()
        serving = rig.begin(client)
        reply = await rig.reply()
        reply.say(delta("one"))
        await in_time(serving)
        assert reply.closed and outcomes(rig) == ["client_gone"]


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
    async with a_rig(tmp_path, tenants=[tenant(concurrency=1)]) as rig:
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


# A ledger that can not be written


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


# Answers that are shared


async def test_a_kept_answer_is_given_again_and_costs_nothing(tmp_path: Path) -> None:
    async with a_rig(tmp_path) as rig:
        rig.script(delta("one"), usage_frame(), DONE)
        first, second = await rig.ask(SURE_STREAM), await rig.ask(SURE_STREAM)
        assert first.content == second.content and second.headers["x-warmpath-cache"] == "hit"
        assert [receipt["source"] for receipt in rig.receipts()] == ["engine", "cache"]
        assert rig.receipts()[1]["cost"] == "0" and len(rig.replies) == 1


async def test_followers_get_the_usage_that_they_asked_for(tmp_path: Path) -> None:
    async with a_rig(tmp_path) as rig:
        leader = Client(SURE_STREAM)
        follower = Client(chat(temperature=0, stream=True, stream_options={"include_usage": True}))
        serving = [rig.begin(leader)]
        reply = await rig.reply()
        serving.append(rig.begin(follower))
        reply.say(delta("one"), usage_frame(), DONE)
        await in_time(asyncio.gather(*serving))
        assert leader.content == delta("one") + DONE
        assert follower.content == delta("one") + usage_frame() + DONE
        assert follower.headers["x-warmpath-cache"] == "shared" and len(rig.replies) == 1


async def test_other_stream_options_are_another_request(tmp_path: Path) -> None:
    async with a_rig(tmp_path) as rig:
        rig.script(delta("one"), DONE)
        await rig.ask(SURE_STREAM)
        await rig.ask(chat(temperature=0, stream=True, stream_options={"continuous_usage_stats": True}))
        assert len(rig.replies) == 2


async def test_a_leader_that_is_refused_leaves_nobody_waiting(tmp_path: Path) -> None:
    """The store is asked for a kept answer meanwhile, so that the follower is there before the refusal."""
    async with a_rig(tmp_path, tenants=[tenant(requests="1/1m")]) as rig:
        rig.script(answer())
        await rig.ask(chat())
        asked, go_on = asyncio.Event(), asyncio.Event()
        get = rig.storage.get

        async def slow_get(key: str) -> bytes | None:
            asked.set()
            await go_on.wait()
            return await get(key)

        rig.storage.get = slow_get  # type: ignore[method-assign]
        leader, follower = Client(SURE), Client(SURE)
        serving = [rig.begin(leader)]
        await in_time(asked.wait())
        serving.append(rig.begin(follower))
        await settle()
        go_on.set()
        await in_time(asyncio.gather(*serving))
        assert (leader.status, follower.status) == (429, 429)


async def test_a_leader_whose_client_leaves_works_on_for_its_followers(tmp_path: Path) -> None:
    async with a_rig(tmp_path) as rig:
        leader, follower = Client(SURE_STREAM), Client(SURE_STREAM)
        serving = [rig.begin(leader)]
        reply = await rig.reply()
        reply.say(delta("one"))
        serving.append(rig.begin(follower))
        await settle()
        leader.leave()
        await settle()
        reply.say(usage_frame(), DONE)
        await in_time(asyncio.gather(*serving))
        assert follower.content == delta("one") + DONE
        led, followed = sorted(rig.receipts(), key=lambda receipt: str(receipt["source"]), reverse=True)
        assert (led["outcome"], led["output"], led["attempts"][0]["outcome"]) == ("client_gone", 2, "ok")
        assert (followed["outcome"], followed["cost"]) == ("complete", "0")


async def test_a_leader_whose_client_takes_nothing_works_on_for_its_followers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replies, "STALL_SECONDS", 0.02)
    async with a_rig(tmp_path) as rig:
        leader, follower = Client(SURE_STREAM), Client(SURE_STREAM)
        leader.takes = asyncio.Event()
        serving = [rig.begin(leader)]
        reply = await rig.reply()
        serving.append(rig.begin(follower))
        reply.say(delta("one"), DONE)
        await in_time(asyncio.gather(*serving))
        assert follower.content == delta("one") + DONE


async def test_a_leader_and_its_followers_that_all_leave_end_the_servers_work(tmp_path: Path) -> None:
    async with a_rig(tmp_path) as rig:
        clients = [Client(SURE_STREAM) for _ in range(3)]
        serving = [rig.begin(clients[0])]
        reply = await rig.reply()
        reply.say(delta("one"))
        serving += [rig.begin(client) for client in clients[1:]]
        await settle()
        for client in clients:
            assert not reply.closed
            client.leave()
            await settle()
        assert reply.closed
        await in_time(asyncio.gather(*serving))
        assert outcomes(rig) == ["client_gone"] * 3


async def test_a_leader_that_fails_at_once_lets_its_followers_ask_for_themselves(tmp_path: Path) -> None:
    async with a_rig(tmp_path) as rig:
        leader, follower = Client(SURE_STREAM), Client(SURE_STREAM)
        serving = [rig.begin(leader)]
        reply = await rig.reply()
        serving.append(rig.begin(follower))
        await settle()
        reply.say(ProviderFailure(Fault.REFUSED, "", status=400, body=b"{}"))
        own = await rig.reply(1)
        own.say(delta("one"))
        await settle()
        assert follower.content == delta("one")
        follower.leave()  # and is watched, as every one that asks for itself
        await in_time(asyncio.gather(*serving))
        assert own.closed and outcomes(rig) == ["refused", "client_gone"]


async def test_a_leader_that_is_cut_cuts_its_followers(tmp_path: Path) -> None:
    async with a_rig(tmp_path) as rig:
        clients = [Client(SURE_STREAM), Client(SURE_STREAM)]
        serving = [rig.begin(clients[0])]
        reply = await rig.reply()
        serving.append(rig.begin(clients[1]))
        server = next(server for server in rig.servers.values() if server.replies)
        server.record_may_come = asyncio.Event()
        reply.say(delta("one"))
        await settle()
        reply.say(cut())
        await in_time(server.asked_for_records.wait())
        await settle()
        assert serving[1].done() and not serving[0].done()  # who follows does not wait for the leader's bill
        server.record_may_come.set()
        await in_time(asyncio.gather(*serving))
        for client in clients:
            assert DONE not in client.content and last_event(client)["error"]["code"] == "upstream_cut"
        assert outcomes(rig) == ["upstream_cut"] * 2
        rig.script(delta("again"), DONE)
        assert (await rig.ask(SURE_STREAM)).content == delta("again") + DONE  # it was not kept


async def test_an_answer_over_the_limit_is_given_to_who_follows_and_not_kept(tmp_path: Path) -> None:
    async with a_rig(tmp_path, cache={"max_answer_bytes": 10}) as rig:
        clients = [Client(SURE_STREAM), Client(SURE_STREAM)]
        serving = [rig.begin(clients[0])]
        reply = await rig.reply()
        serving.append(rig.begin(clients[1]))
        await settle()
        reply.say(delta("one"), delta("two"), DONE)
        await in_time(asyncio.gather(*serving))
        assert [client.content for client in clients] == [delta("one") + delta("two") + DONE] * 2
        rig.script(DONE)
        await rig.ask(SURE_STREAM)
        assert len(rig.replies) == 2


async def test_nobody_waits_for_a_call_of_another_class(tmp_path: Path) -> None:
    async with a_rig(tmp_path) as rig:
        batch, realtime = Client(chat(temperature=0, service_tier="flex")), Client(SURE)
        serving = [rig.begin(batch)]
        slow = await rig.reply()
        serving.append(rig.begin(realtime))
        await settle()
        assert len(rig.replies) == 2
        next(reply for reply in rig.replies if reply is not slow).say(answer())
        await settle()
        assert realtime.whole and not batch.whole
        slow.say(answer())
        await in_time(asyncio.gather(*serving))


async def test_a_fallbacks_answer_is_not_kept(tmp_path: Path) -> None:
    async with a_rig(tmp_path) as rig:
        for name in ("a", "b"):
            rig.servers[name].script = (cut(),)
        rig.servers["c"].script = (answer("from c"),)
        assert b"from c" in (await rig.ask(SURE)).content
        for name in ("a", "b"):
            rig.servers[name].script = (answer("from itself"),)
        for server in rig.fleet:
            server.breaker.succeeded(asyncio.get_running_loop().time())
        assert b"from itself" in (await rig.ask(SURE)).content


async def test_what_the_store_makes_up_is_no_answer(tmp_path: Path) -> None:
    async with a_rig(tmp_path) as rig:
        rig.script(answer())

        async def noise(key: str) -> bytes:
            return b"\xc1 noise"

        rig.storage.get = noise  # type: ignore[method-assign]
        assert (await rig.ask(SURE)).content == answer()


# A policy that changes


async def test_a_call_in_flight_keeps_its_server_and_one_that_waits_takes_a_new_one(tmp_path: Path) -> None:
    few = policy_of()["deployments"]
    for deployment in few:
        deployment["max_concurrency"] = 1
    models = [{"name": "m", "deployments": ["a"]}]
    async with a_rig(tmp_path, deployments=few, models=models) as rig:
        first, second = Client(STREAM), Client(STREAM)
        serving = [rig.begin(first)]
        old = await rig.reply()
        serving.append(rig.begin(second))
        await settle()
        before = list(rig.fleet)
        rig.write_policy(policy_of(deployments=few[1:], models=[{"name": "m", "deployments": ["b", "c"]}]))
        assert await rig.house.policies.reload()
        await settle()
        assert second.whole and second.status == 503 and "no deployment" in second.json["error"]["message"]
        old.say(delta("one"), DONE)
        await in_time(asyncio.gather(*serving))
        assert first.content == delta("one") + DONE
        assert all(server.places_taken == 0 for server in before)
        rig.script(DONE)
        assert (await rig.ask(STREAM)).headers["x-warmpath-deployment"] in "bc"
