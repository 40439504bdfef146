"""Random histories of stored responses, with a storage that hangs and fails: each `store` field says what is stored."""

from __future__ import annotations

import asyncio
import json
import tempfile
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.endpoints.responses.stored import response_of
from tests.gateway import test_serve_histories as serving
from tests.gateway.endpoints.responses.translated import events_of
from tests.gateway.harness import DONE, Client, Rig, a_rig, answer, delta

FIELDS: list[dict[str, Any]] = [
    {"stream": True, "temperature": 0},
    {"temperature": 0},
    {"stream": True},
    {},
    {"store": False},
]
ENDS = ("response.completed", "response.incomplete")
STORAGE = ("available", "away", "hanging")
steps = st.one_of(
    st.tuples(st.just("ask"), st.integers(0, len(FIELDS) - 1)),
    st.tuples(st.just("continue_last"), st.integers(0, len(FIELDS) - 1)),
    *serving.of_a_call,
    st.tuples(st.just("finish"), serving.some),
    st.tuples(st.just("storage"), st.integers(0, len(STORAGE) - 1)),
)


class History(serving.History):
    def __init__(self, rig: Rig) -> None:
        super().__init__(rig)
        self.available = asyncio.Event()
        self.available.set()
        self.put = rig.storage.put_document
        rig.storage.put_document = self.put_when_available  # type: ignore[method-assign]

    async def put_when_available(self, *given: Any, **named: Any) -> bool:
        await self.available.wait()
        return await self.put(*given, **named)

    async def storage(self, how: int) -> None:
        self.rig.storage.documents_away = STORAGE[how] == "away"
        if STORAGE[how] == "hanging":
            self.available.clear()
        else:
            self.available.set()

    async def ask(self, fields: int, **more: Any) -> None:
        body = json.dumps({"model": "m", "input": f"{len(self.clients)}", **FIELDS[fields], **more}).encode()
        self.clients.append(Client(body, path="/v1/responses"))
        self.tasks.append(self.rig.begin(self.clients[-1]))

    async def continue_last(self, fields: int) -> None:
        """Continue the last response that a client has."""
        responses = [response for client in self.clients if (response := response_at(client)) is not None]
        await self.ask(fields, **({"previous_response_id": responses[-1]["id"]} if responses else {}))

    async def finish(self, number: int) -> None:
        if talking := [reply for reply in self.rig.replies if not reply.closed]:
            reply = talking[number % len(talking)]
            for word in (delta("so"), DONE) if reply.call.stream else (answer(),):
                self.tell(reply, word)

    async def end(self) -> None:
        await self.step("finish", 0)
        await self.storage(0)
        await super().end()

    async def check_stored(self) -> None:
        complete = {row["call_id"] for row in self.rig.receipts() if row["outcome"] == "complete"}
        for client in self.clients:
            response = response_at(client)
            call_id = client.headers.get("x-request-id", "")
            document = await self.rig.storage.get_document("t", call_id.replace("req_", "resp_"))
            if response is None:
                assert document is None or call_id in complete, "stored, but no complete answer"
            elif response["store"]:
                assert document is not None and json.loads(response_of(document)) == response
            else:
                assert document is None


def response_at(client: Client) -> Any:
    """Return the response whose end a client has, or None."""
    if client.status != 200 or not client.whole:
        return None
    if client.headers["content-type"] == "application/json":
        return client.json
    last = events_of(client.content)[-1]
    return last["response"] if last["type"] in ENDS else None


@settings(max_examples=100)
@given(st.lists(steps, max_size=25))
async def test_the_store_field_always_says_whether_a_response_is_stored(history: list[tuple[str, int]]) -> None:
    with tempfile.TemporaryDirectory() as directory:
        async with a_rig(Path(directory), responses={"keep": "30d"}) as rig:
            state = History(rig)
            for step in history:
                await state.step(*step)
            await state.end()
            await state.check_stored()
