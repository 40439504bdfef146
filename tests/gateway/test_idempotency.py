"""Requests with an idempotency key, with real components and scripted deployments."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from gateway import idempotency
from gateway.core.api_keys import hash_key
from gateway.idempotency import Idempotency
from gateway.providers.base import Fault, ProviderFailure
from tests.gateway.harness import (
    DONE,
    PEPPER,
    Client,
    Rig,
    a_rig,
    answer,
    chat,
    cut,
    delta,
    in_time,
    last_event,
    outcomes,
    settle,
    tenant,
    usage_frame,
)

STREAM = (delta("one"), delta("two"), usage_frame(), DONE)


def keyed(body: bytes, key: str = "k1", *, headers: Sequence[tuple[bytes, bytes]] = (), **options: Any) -> Client:
    return Client(body, headers=[(b"idempotency-key", key.encode()), *headers], **options)


async def run(rig: Rig, client: Client, replica: Idempotency | None = None) -> Client:
    await in_time(rig.begin(client, replica))
    return client


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("chat/completions", chat()),
        ("chat/completions", chat(stream=True)),
        ("responses", json.dumps({"model": "m", "input": "hello"}).encode()),
        ("responses", json.dumps({"model": "m", "input": "hello", "stream": True}).encode()),
        ("messages", chat(max_tokens=9)),
    ],
)  # fmt: skip
@pytest.mark.parametrize("elsewhere", [False, True])
async def test_an_answer_is_replayed_byte_by_byte_and_billed_once(
    tmp_path: Path, path: str, body: bytes, elsewhere: bool
) -> None:
    async with a_rig(tmp_path, responses={"keep": "1h"}) as rig:
        rig.script(*STREAM) if b'"stream"' in body else rig.script(answer())
        first = await run(rig, keyed(body, path=f"/v1/{path}"))
        replica = Idempotency(rig.storage) if elsewhere else None
        second = await run(rig, keyed(body, path=f"/v1/{path}"), replica)
        assert (second.status, second.content) == (200, first.content) and first.content
        assert second.headers["content-type"] == first.headers["content-type"]
        assert second.headers["idempotent-replayed"] == "true" and "idempotent-replayed" not in first.headers
        assert second.headers["x-warmpath-replayed-request"] == first.headers["x-request-id"]
        assert (len(rig.replies), len(rig.receipts())) == (1, 1)


async def test_other_keys_other_tenants_and_no_key_are_other_requests(tmp_path: Path) -> None:
    other = "wp-other-0123456789abcdef"
    tenants = [tenant(), {"name": "u", "keys": [{"id": "other", "hash": hash_key(other, PEPPER)}]}]
    async with a_rig(tmp_path, tenants=tenants) as rig:
        rig.script(answer())
        for client in (
            keyed(chat()),
            keyed(chat(), "k2"),
            Client(chat()),
            keyed(chat(), key="k1"),
            keyed(chat(), "k3"),
        ):
            await run(rig, client)
        stranger = Client(chat(), key=other, headers=[(b"idempotency-key", b"k1")])
        await run(rig, stranger)
        assert (stranger.status, len(rig.replies)) == (200, 5)  # the fourth was the first one's answer


async def test_a_key_that_may_use_less_than_its_tenant_gets_no_answer_of_its_tenants_other_keys(tmp_path: Path) -> None:
    narrow = "wp-narrow-0123456789abcdef"
    wide = tenant()
    wide["keys"].append({"id": "narrow", "hash": hash_key(narrow, PEPPER), "models": ["other"]})
    async with a_rig(tmp_path, tenants=[wide]) as rig:
        rig.script(answer())
        await run(rig, keyed(chat()))
        refused = await run(rig, Client(chat(), key=narrow, headers=[(b"idempotency-key", b"k1")]))
        assert refused.status == 403


@pytest.mark.parametrize("in_flight", [False, True])
async def test_another_body_under_the_same_key_is_rejected(tmp_path: Path, in_flight: bool) -> None:
    async with a_rig(tmp_path) as rig:
        first = keyed(chat())
        serving = rig.begin(first)
        reply = await rig.reply()
        if not in_flight:
            reply.say(answer())
            await in_time(serving)
        for replica in (None, Idempotency(rig.storage)):
            other = await run(rig, keyed(chat(temperature=1)), replica)
            assert (other.status, other.json["error"]["code"]) == (422, "idempotency_key_reused")
            assert other.json["error"]["param"] == "Idempotency-Key" and other.headers["x-should-retry"] == "false"
        reply.say(answer())
        await in_time(serving)
        assert first.status == 200


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("elsewhere", [False, True])
async def test_an_equal_request_in_flight_is_joined(tmp_path: Path, stream: bool, elsewhere: bool) -> None:
    async with a_rig(tmp_path) as rig:
        body = chat(stream=stream)
        first, second = keyed(body), keyed(body)
        serving = [rig.begin(first)]
        reply = await rig.reply()
        serving.append(rig.begin(second, Idempotency(rig.storage) if elsewhere else None))
        if stream:
            reply.say(delta("one"))
            await settle()
            assert elsewhere or second.content == delta("one")  # as it grows
            reply.say(usage_frame(), DONE)
        else:
            reply.say(answer())
        await in_time(asyncio.gather(*serving))
        assert (second.status, second.content) == (200, first.content) and second.whole
        assert (len(rig.replies), len(rig.receipts())) == (1, 1)


@pytest.mark.parametrize("elsewhere", [False, True])
async def test_a_request_in_flight_may_be_rejected_unless_its_sdk_marks_a_retry(
    tmp_path: Path, elsewhere: bool
) -> None:
    async with a_rig(tmp_path, idempotency={"in_flight": "reject"}) as rig:
        first = keyed(chat())
        serving = [rig.begin(first)]
        reply = await rig.reply()
        replica = Idempotency(rig.storage) if elsewhere else None
        second = await run(rig, keyed(chat(), headers=[(b"x-stainless-retry-count", b"0")]), replica)
        assert (second.status, second.json["error"]["code"]) == (409, "idempotency_key_in_flight")
        assert second.headers["x-should-retry"] == "true" and second.headers["retry-after"]
        retry = keyed(chat(), headers=[(b"x-stainless-retry-count", b"1")])
        serving.append(rig.begin(retry, replica))
        await settle()
        reply.say(answer())
        await in_time(asyncio.gather(*serving))
        assert retry.content == first.content and len(rig.replies) == 1


async def test_a_client_that_lost_its_connection_gets_the_answer_by_its_retry(tmp_path: Path) -> None:
    async with a_rig(tmp_path) as rig:
        first = keyed(chat(stream=True))
        serving = rig.begin(first)
        reply = await rig.reply()
        reply.say(delta("one"))
        await settle()
        first.leave()
        await settle()
        assert not reply.closed
        reply.say(usage_frame(), DONE)
        await in_time(serving)
        retry = await run(rig, keyed(chat(stream=True)))
        assert retry.content == delta("one") + DONE
        assert outcomes(rig) == ["client_gone"] and rig.receipts()[0]["output"] == 2


async def test_by_policy_a_client_that_leaves_ends_its_request_and_its_retry_runs(tmp_path: Path) -> None:
    async with a_rig(tmp_path, idempotency={"finish": False}) as rig:
        first = keyed(chat(stream=True))
        serving = rig.begin(first)
        reply = await rig.reply()
        reply.say(delta("one"))
        await settle()
        first.leave()
        await in_time(serving)
        assert reply.closed
        rig.script(*STREAM)
        assert (await run(rig, keyed(chat(stream=True)))).whole and len(rig.replies) == 2


async def test_a_failed_request_is_not_stored(tmp_path: Path) -> None:
    async with a_rig(tmp_path) as rig:
        bad = await run(rig, keyed(b"{"))
        rig.script(ProviderFailure(Fault.REFUSED, "no", status=400, body=b"{}"))
        refused = await run(rig, keyed(chat()))
        rig.script(delta("one"), cut())
        broken = await run(rig, keyed(chat(stream=True, n=2)))
        assert "error" in last_event(broken)
        rig.script(answer())
        fine = await run(rig, keyed(chat()))
        assert [one.status for one in (bad, refused, broken, fine)] == [400, 400, 200, 200]


async def test_followers_of_a_failed_request_run_themselves(tmp_path: Path) -> None:
    async with a_rig(tmp_path) as rig:
        clients = [keyed(chat()) for _ in range(3)]
        serving = [rig.begin(clients[0])]
        reply = await rig.reply()
        serving += [rig.begin(clients[1]), rig.begin(clients[2])]
        await settle()
        rig.script(answer())
        reply.say(ProviderFailure(Fault.REFUSED, "no", status=400, body=b"{}"))
        await in_time(asyncio.gather(*serving))
        assert [client.status for client in clients] == [400, 200, 200]
        assert clients[1].content == clients[2].content and len(rig.replies) == 2


async def test_a_request_whose_gateway_died_runs_once_when_the_lease_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(idempotency, "LEASE_SECONDS", 0.2)
    async with a_rig(tmp_path) as rig:
        dead = Idempotency(rig.storage)
        monkeypatch.setattr(dead, "_extend", lambda reservation: asyncio.sleep(3600))
        first = keyed(chat())
        serving = rig.begin(first, dead)
        await rig.reply()
        clients = [keyed(chat()), keyed(chat())]
        rig.script(answer())
        replicas = [Idempotency(rig.storage), Idempotency(rig.storage)]
        await in_time(asyncio.gather(*map(rig.begin, clients, replicas)))
        assert [client.status for client in clients] == [200, 200] and clients[0].content == clients[1].content
        assert len(rig.replies) == 2  # the dead one's, and one more
        rig.replies[0].say(answer())
        await in_time(serving)


async def test_a_lease_is_extended_while_its_request_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(idempotency, "EXTEND_SECONDS", 0.001)
    async with a_rig(tmp_path) as rig:
        extended: asyncio.Queue[bool] = asyncio.Queue()
        extend = rig.storage.extend_lease

        async def watched(*options: Any, **named: Any) -> bool:
            extended.put_nowait(await extend(*options, **named))
            return True

        monkeypatch.setattr(rig.storage, "extend_lease", watched)
        first, second = keyed(chat()), keyed(chat())
        serving = [rig.begin(first)]
        reply = await rig.reply()
        serving.append(rig.begin(second, Idempotency(rig.storage)))
        assert [await in_time(extended.get()) for _ in range(3)] == [True] * 3
        reply.say(answer())
        await in_time(asyncio.gather(*serving))
        assert second.content == first.content


async def test_an_answer_that_is_too_large_is_sent_and_not_stored(tmp_path: Path) -> None:
    async with a_rig(tmp_path, idempotency={"max_answer_bytes": 300}) as rig:
        rig.script(answer("x" * 400))
        first, second = await run(rig, keyed(chat())), await run(rig, keyed(chat()))
        assert (first.status, second.status, len(rig.replies)) == (200, 200, 2)
        assert rig.idempotency.outcomes["not_stored"] == 2


@pytest.mark.parametrize(("limits", "status"), [("refuse", 503), ("local_share", 200)])
async def test_while_the_storage_is_away_keyed_requests_follow_the_policy(
    tmp_path: Path, limits: str, status: int
) -> None:
    async with a_rig(tmp_path, storage_outage={"limits": limits}) as rig:
        rig.script(answer())
        rig.storage.documents_away = True
        client = await run(rig, keyed(chat()))
        assert client.status == status
        if status == 503:
            assert client.json["error"]["code"] == "storage_unavailable" and client.headers["retry-after"]


async def test_an_answer_that_cannot_be_stored_is_sent_all_the_same(tmp_path: Path) -> None:
    async with a_rig(tmp_path) as rig:
        first = keyed(chat())
        serving = rig.begin(first)
        reply = await rig.reply()
        rig.storage.documents_away = True
        reply.say(answer())
        await in_time(serving)
        assert first.whole and rig.idempotency.outcomes["not_stored"] == 1


@pytest.mark.parametrize("key", ["", "x" * 256, "a\x01b"])
async def test_an_unusable_key_is_named(tmp_path: Path, key: str) -> None:
    async with a_rig(tmp_path) as rig:
        refused = await run(rig, keyed(chat(), key))
        assert (refused.status, refused.json["error"]["param"]) == (400, "Idempotency-Key")


async def test_the_policy_may_ignore_the_header(tmp_path: Path) -> None:
    async with a_rig(tmp_path, idempotency={"keep": "off"}) as rig:
        rig.script(answer())
        await run(rig, keyed(chat()))
        await run(rig, keyed(chat()))
        assert len(rig.replies) == 2


async def test_answers_are_bounded_per_tenant(tmp_path: Path) -> None:
    async with a_rig(tmp_path, idempotency={"max_stored_bytes": 3000}) as rig:
        rig.script(answer("x" * 900))
        for number in range(5):
            await run(rig, keyed(chat(), f"k{number}"))
        await run(rig, keyed(chat(), "k4"))
        assert len(rig.replies) == 5
        await run(rig, keyed(chat(), "k0"))
        assert len(rig.replies) == 6
