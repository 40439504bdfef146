"""Responses in the background when their gateway dies, stops or drains, and while the storage is unreachable."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from gateway.background import follower, lease, run
from tests.gateway.background.rig import (
    STREAM,
    asking,
    begin,
    call,
    create,
    polled,
    stored_rig,
    streamed,
    text_of,
)
from tests.gateway.endpoints.responses.translated import check_response, events_of
from tests.gateway.harness import (
    DONE,
    Client,
    delta,
    in_time,
    outcomes,
    usage_frame,
)
from tests.openai_spec import Validate


@pytest.mark.parametrize("elsewhere", [False, True])
async def test_a_response_whose_gateway_died_has_failed(
    tmp_path: Path, elsewhere: bool, monkeypatch: pytest.MonkeyPatch, validate: Validate
) -> None:
    """The lease of the dead gateway ends, here because its reservation is settled."""
    async with stored_rig(tmp_path) as rig:
        survivor = rig.another_background()
        name = (await create(rig))["id"]
        reply = await rig.reply()
        reply.say(delta("one "))
        await polled(rig, name, "in_progress")
        assert (await call(rig, "GET", name, service=survivor)).json["status"] == "in_progress", "its lease is held"
        client = Client(method="GET", path=f"/v1/responses/{name}")
        following = begin(rig, client, "stream=true", survivor)
        while b"one " not in client.content:
            await asyncio.sleep(0.01)
        await lease.RunLease(rig.storage, "t", name).release()
        failed = await polled(rig, name, service=survivor)
        check_response(validate, failed)
        assert (failed["status"], failed["error"]["message"]) == ("failed", follower.GATEWAY_DIED)
        await in_time(following)
        events = events_of(client.content)
        assert events[-1]["type"] == "response.failed" and events[-1]["response"] == failed
        reply.say(usage_frame(), DONE)


async def test_a_lease_is_extended_while_the_response_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "EXTEND_SECONDS", 0.0)
    extended = asyncio.Event()
    async with stored_rig(tmp_path) as rig:
        extend = rig.storage.extend_lease

        async def noted(reservation_id: str, **given: Any) -> bool:
            is_held = await extend(reservation_id, **given)
            if is_held and "/background/" in reservation_id:
                extended.set()
            return is_held

        monkeypatch.setattr(rig.storage, "extend_lease", noted)
        await create(rig)
        await in_time(extended.wait())
        (await rig.reply()).say(*STREAM)


async def test_a_gateway_that_stops_cuts_its_runs_off(tmp_path: Path) -> None:
    async with stored_rig(tmp_path) as rig:
        name = (await create(rig))["id"]
        reply = await rig.reply()
        reply.say(delta("one "))
        await polled(rig, name, "in_progress")
        await in_time(rig.background.close())
        response = (await call(rig, "GET", name)).json
        assert (response["status"], response["error"]["message"]) == ("failed", "the gateway is shutting down")
        assert len(outcomes(rig)) == 1 and (await streamed(rig, name))[-1]["type"] == "response.failed"


async def test_a_gateway_that_stops_releases_a_run_that_is_ending(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run has its answer, and waits until events that came before are written."""
    async with stored_rig(tmp_path) as rig:
        name = (await create(rig))["id"]
        reply = await rig.reply()
        await polled(rig, name, "in_progress")
        writing, put = asyncio.Event(), rig.storage.put_document

        async def slow_once(tenant: str, document_name: str, *given: Any, **named: Any) -> bool:
            if tenant.startswith("events/") and not writing.is_set():
                writing.set()
                await asyncio.sleep(60.0)
            return await put(tenant, document_name, *given, **named)

        monkeypatch.setattr(rig.storage, "put_document", slow_once)
        reply.say(STREAM[0])
        await in_time(writing.wait())
        reply.say(*STREAM[1:])
        await polled(rig, name, "completed")
        await in_time(rig.background.close())
        assert not await lease.RunLease(rig.storage, "t", name).is_held()
        assert (await streamed(rig, name))[-1]["type"] == "response.completed"


async def test_a_stream_elsewhere_may_begin_before_the_first_events_are_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with stored_rig(tmp_path) as rig:
        go_on, put = asyncio.Event(), rig.storage.put_document

        async def held_back(tenant: str, document_name: str, *given: Any, **named: Any) -> bool:
            if tenant.startswith("events/"):
                await go_on.wait()
            return await put(tenant, document_name, *given, **named)

        monkeypatch.setattr(rig.storage, "put_document", held_back)
        name = (await create(rig))["id"]
        client = Client(method="GET", path=f"/v1/responses/{name}")
        following = begin(rig, client, "stream=true", rig.another_background())
        await asyncio.sleep(0.1)  # several polls
        go_on.set()
        (await rig.reply()).say(*STREAM)
        await in_time(following)
        assert client.status == 200, client.content
        events = events_of(client.content)
        assert (events[0]["type"], events[-1]["type"]) == ("response.created", "response.completed")


async def test_a_stream_elsewhere_ends_with_the_last_event(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The response is stored as complete before its last events are."""
    async with stored_rig(tmp_path) as rig:
        name = (await create(rig))["id"]
        reply = await rig.reply()
        await polled(rig, name, "in_progress")
        client = Client(method="GET", path=f"/v1/responses/{name}")
        following = begin(rig, client, "stream=true", rig.another_background())
        ending, go_on, put = asyncio.Event(), asyncio.Event(), rig.storage.put_document

        async def held_back(tenant: str, document_name: str, *given: Any, **named: Any) -> bool:
            if tenant.startswith("events/"):
                ending.set()
                await go_on.wait()
            return await put(tenant, document_name, *given, **named)

        monkeypatch.setattr(rig.storage, "put_document", held_back)
        reply.say(*STREAM)
        await in_time(ending.wait())
        await polled(rig, name, "completed")
        await asyncio.sleep(0.1)  # several polls
        go_on.set()
        await in_time(following)
        assert events_of(client.content)[-1]["type"] == "response.completed"


async def test_a_gateway_that_drains_lets_its_runs_end(tmp_path: Path) -> None:
    async with stored_rig(tmp_path) as rig:
        name = (await create(rig))["id"]
        reply = await rig.reply()
        closing = asyncio.create_task(rig.background.close(drain_seconds=5.0))
        reply.say(*STREAM)
        await in_time(closing)
        assert (await call(rig, "GET", name)).json["status"] == "completed"


async def test_the_end_is_stored_when_the_storage_is_back(tmp_path: Path) -> None:
    async with stored_rig(tmp_path) as rig:
        name = (await create(rig))["id"]
        reply = await rig.reply()
        rig.storage.documents_away = True
        reply.say(*STREAM)
        for _ in range(20):
            await asyncio.sleep(0.01)
        rig.storage.documents_away = False
        response = await polled(rig, name)
        assert (response["status"], text_of(response)) == ("completed", "one two")
        assert (await streamed(rig, name))[-1]["type"] == "response.completed"


async def test_nothing_is_accepted_while_the_storage_is_away(tmp_path: Path) -> None:
    async with stored_rig(tmp_path) as rig:
        rig.storage.documents_away = True
        client = await rig.ask(Client(asking(), path="/v1/responses"))
        assert (client.status, client.json["error"]["code"]) == (503, "storage_unavailable")
        assert not rig.receipts()
