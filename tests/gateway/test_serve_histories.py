"""Random histories of many concurrent requests: the invariants hold in any order of events.

A history is a list of steps. Between two steps every task runs until it waits. A history ends when each deployment has
ended its responses and each waiting client has disconnected.
"""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.providers.base import Fault, ProviderFailure
from tests.gateway.doubles import ScriptedResponse
from tests.gateway.harness import DONE, Client, Rig, a_rig, answer, chat, delta, in_time, policy_of, settle, tenant

FIELDS: list[dict[str, Any]] = [
    {"stream": True, "temperature": 0},
    {"stream": True, "temperature": 0, "stream_options": {"include_usage": True}},
    {"stream": True, "temperature": 0, "service_tier": "flex"},
    {"temperature": 0},
    {"stream": True},
    {"stream": True, "model": "other"},
]
WORDS: list[bytes | Exception | None] = [
    delta("one"),
    delta("two") + delta("three"),
    delta("four") + DONE,
    DONE,
    answer(),
    b'data: {"error": {"message": "out of memory"}}\n\n',
    ProviderFailure(Fault.CUT, "cut"),
    ProviderFailure(Fault.STATUS, "busy", status=503),
    ProviderFailure(Fault.REFUSED, "no", status=400, body=b'{"error": {}}'),
    ZeroDivisionError("a bug"),
    None,
]
some = st.integers(0, 7)  # of what there is, counted round
of_a_call = (
    st.tuples(st.just("say"), some, st.integers(0, len(WORDS) - 1)),
    st.tuples(st.just("leave"), some),
    st.tuples(st.just("cancel"), some),
    st.tuples(st.just("hesitate"), some),
    st.tuples(st.just("take"), some),
)
steps = st.one_of(
    st.tuples(st.just("ask"), st.integers(0, len(FIELDS) - 1)),
    *of_a_call,
    st.tuples(st.just("policy"), st.integers(1, 3)),
    st.tuples(st.just("ledger"), st.booleans()),
)


def policy(places: int) -> dict[str, Any]:
    known = policy_of()
    for deployment in known["deployments"]:
        deployment["max_concurrency"] = places
    limits = {"requests": "6/1m", "tokens": "10k/1m", "concurrency": 4, "budget": {"amount": "1", "per": "month"}}
    return {**known, "tenants": [tenant(**limits)], "classes": {"realtime": {"max_queue": 1}}}


class History:
    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        self.clients: list[Client] = []
        self.tasks: list[asyncio.Task[None]] = []
        self.said: dict[str, bytes] = {}  # by call id: what its server said until now
        self.ledger_failed = False

    async def step(self, kind: str, *numbers: int) -> None:
        await getattr(self, kind)(*numbers)
        await settle()

    async def ask(self, fields: int) -> None:
        self.clients.append(Client(chat(**FIELDS[fields])))
        self.tasks.append(self.rig.begin(self.clients[-1]))

    async def say(self, number: int, word: int) -> None:
        if talking := [reply for reply in self.rig.replies if not reply.closed]:
            self.tell(talking[number % len(talking)], WORDS[word])

    def tell(self, reply: ScriptedResponse, word: bytes | Exception | None) -> None:
        if isinstance(word, bytes):
            self.said[reply.call.id] = self.said.get(reply.call.id, b"") + word
        reply.say(word)

    async def leave(self, number: int) -> None:
        if self.clients:
            self.clients[number % len(self.clients)].leave()

    async def hesitate(self, number: int) -> None:
        if self.clients and (client := self.clients[number % len(self.clients)]).takes is None:
            client.takes = asyncio.Event()

    async def take(self, number: int) -> None:
        if self.clients and (takes := self.clients[number % len(self.clients)].takes) is not None:
            takes.set()

    async def cancel(self, number: int) -> None:
        if self.tasks:
            self.tasks[number % len(self.tasks)].cancel()

    async def policy(self, places: int) -> None:
        self.rig.write_policy(policy(places))
        assert await self.rig.components.policies.reload()

    async def ledger(self, fails: bool) -> None:
        self.rig.ledger.fault_ahead = fails
        self.ledger_failed |= fails

    async def end(self) -> None:
        for number in range(len(self.clients)):
            await self.take(number)
        for _ in range(20):
            for reply in self.rig.replies:
                self.tell(reply, None)
            await settle()
            if all(task.done() for task in self.tasks):
                break
        for client in self.clients:
            client.leave()
        await in_time(asyncio.gather(*self.tasks, return_exceptions=True))

    def check(self) -> None:
        asked = {reply.call.id for reply in self.rig.replies}
        receipts = {receipt["call_id"]: receipt for receipt in self.rig.receipts()}
        records = self.rig.telemetry.records
        assert len(records) == len(self.clients), "a request is reported once"
        for record in records:
            call = record.call
            assert call is not None
            billed = call.id in asked or record.status == 200
            if not self.ledger_failed:
                assert (call.id in receipts) == billed, (record.status, record.outcome)
        for client in self.clients:
            self.check_truth(client, receipts)

    def check_truth(self, client: Client, receipts: dict[str, Any]) -> None:
        if client.status != 200:
            return
        receipt = receipts.get(client.headers["x-request-id"])
        complete = receipt is not None and receipt["outcome"] == "complete"
        if client.headers["content-type"] == "application/json":
            assert client.content == answer() and complete
        elif DONE in client.content:
            assert client.content.endswith(DONE) and complete, "an end that was none"
        elif client.whole:
            assert b'"error"' in client.content.rpartition(b"data: ")[2], "neither an end nor an error"
        if receipt is not None and receipt["source"] != "cache" and not receipt["attempts"][1:] and complete:
            assert self.said[receipt["call_id"]].startswith(client.content)


@settings(max_examples=60)
@given(st.lists(steps, max_size=25))
async def test_whatever_happens(history: list[tuple[str, int]]) -> None:
    with tempfile.TemporaryDirectory() as directory:
        async with a_rig(Path(directory), **policy(1)) as rig:
            told = History(rig)
            for step in history:
                await told.step(*step)
            await told.end()
            told.check()
