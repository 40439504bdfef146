"""All work on a large body runs in the worker thread, from the parser to the upstream request."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gateway import idempotency, response_cache
from gateway.core.worker_thread import LARGE_BYTES, in_thread
from gateway.endpoints.chat import ChatEndpoint
from gateway.endpoints.responses import ResponsesTranslator
from gateway.policy import Deployment
from gateway.providers.adjusted import AdjustedProvider
from tests.gateway import harness
from tests.gateway.calls import a_call
from tests.gateway.doubles import ScriptedProvider
from tests.gateway.harness import Client, Rig, a_rig, answer, in_time

WORKER, LOOP = "large bodies_0", threading.current_thread().name


class Threads:
    """In which threads each kind of work ran."""

    def __init__(self) -> None:
        self.of: dict[str, list[str]] = {}

    def note(self, name: str, work: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*arguments: Any, **named: Any) -> Any:
            self.of.setdefault(name, []).append(threading.current_thread().name)
            return work(*arguments, **named)

        return noted


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> Threads:
    seen = Threads()
    for owner, name in (
        (ChatEndpoint, "read"),
        (response_cache, "cache_key"),
        (ScriptedProvider, "render"),
        (idempotency, "_keyed_request"),
        (ResponsesTranslator, "read"),
        (ResponsesTranslator, "_document"),
    ):
        where = name if owner is not ResponsesTranslator else f"responses {name}"
        monkeypatch.setattr(owner, name, seen.note(where, getattr(owner, name)))
    monkeypatch.setattr(harness, "MAX_BODY_BYTES", 4 * LARGE_BYTES)
    return seen


def body(characters: int, **fields: Any) -> bytes:
    return json.dumps({"model": "m", "messages": [{"role": "user", "content": "a" * characters}], **fields}).encode()


async def ask(rig: Rig, path: str, content: bytes) -> Client:
    client = Client(content, path=f"/v1/{path}", headers=[(b"idempotency-key", str(len(content)).encode())])
    await in_time(rig.begin(client))
    assert client.status == 200, client.content
    return client


@pytest.mark.parametrize(("characters", "thread"), [(10, LOOP), (LARGE_BYTES, WORKER)])
async def test_a_chat(characters: int, thread: str, threads: Threads, tmp_path: Path) -> None:
    async with a_rig(tmp_path, idempotency={"keep": "1h"}, cache={"when": "always"}) as rig:
        rig.script(answer())
        await ask(rig, "chat/completions", body(characters))
        if thread == WORKER:
            assert (
                threads.of == {name: [WORKER] for name in ("read", "cache_key", "render", "_keyed_request")}
                and rig.last_call.large
            )
        else:
            assert {name for each in threads.of.values() for name in each} == {LOOP} and not rig.last_call.large


async def test_a_stored_response_and_one_that_continues_it(threads: Threads, tmp_path: Path) -> None:
    """The second body is small, but the history is not."""
    async with a_rig(tmp_path, responses={"keep": "1h"}) as rig:
        rig.script(answer())
        large = json.dumps({"model": "m", "input": "a" * LARGE_BYTES}).encode()
        first = (await ask(rig, "responses", large)).json
        small = json.dumps({"model": "m", "input": "b", "previous_response_id": first["id"]}).encode()
        assert (await ask(rig, "responses", small)).json["store"] is True
        assert threads.of["responses read"] == threads.of["responses _document"] == [WORKER] * 2


async def test_a_prompt_with_the_systems_own_prompt(threads: Threads) -> None:
    """The deployment's fields are added where the request is rendered."""
    deployment = Deployment(name="d", base_url="http://d.invalid/v1", model="x", system_prompt="Be kind.")
    adjusted = AdjustedProvider(ScriptedProvider(), deployment)
    seen: list[str] = []
    adjusted.adjust = lambda call: seen.append(threading.current_thread().name) or call  # type: ignore[func-returns-value, method-assign]
    call = msgspec.structs.replace(a_call(), large=True)
    rendered = await in_thread(adjusted.render, call)
    assert adjusted.unsupported_error(call) is None
    await adjusted.open(call, headers={}, body=rendered)
    await adjusted.count_prompt_tokens(call)
    assert seen == [WORKER, WORKER]
