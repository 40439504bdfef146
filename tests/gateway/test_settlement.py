"""What is noted in the books before a server is asked, and how reservations are settled once it is over."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import msgspec

from gateway.fleet import Fleet
from gateway.ledger import Ledger, Opened
from gateway.limits import LIMITS
from gateway.limits.limiter import Limiter, Reservation
from gateway.policy import Policy
from gateway.providers.base import Unasked
from gateway.settlement import SETTLED_AT_ONCE, Books, Opening, Settler
from gateway.storage.memory import MemoryStorage
from gateway.types import Marks, Operation, Trace, Usage
from tests.gateway.calls import a_call
from tests.gateway.ledger.receipts import a_receipt

POLICY = Policy.model_validate(
    {
        "deployments": [{"name": name, "base_url": "http://a/v1", "model": "served"} for name in ("a", "b")],
        "models": [{"name": "m", "deployments": ["a", "b"]}],
        "tenants": [{"name": "acme"}],
    }
)


class Noted(list[Opened]):
    """Books that only keep what was opened."""

    def open_call(self, opened: Opened) -> None:
        self.append(opened)


def test_every_field_of_an_opened_row_is_in_its_place() -> None:
    call = msgspec.structs.replace(
        a_call(policy=POLICY, tenant="acme", key="key_1"),
        id="req_1", operation=Operation.EMBEDDING, asked_model="alias", end_user="user_1", service_tier="flex",
        class_name="batch", prompt_tokens_estimate=7, trace=Trace(0xABC, 0, sampled=False),
    )  # fmt: skip
    marks = Marks()
    marks.started_ns = 1_790_000_000_000_001_999
    fleet = Fleet(lambda deployment: Unasked())
    fleet.apply(POLICY)
    first, second = fleet
    noted = Noted()
    opening = Opening(cast(Books, noted), call, marks)
    opening(first)
    opening(second)
    known: dict[str, Any] = {
        "kind": "opened",
        "call_id": "req_1",
        "tenant": "acme",
        "key_id": "key_1",
        "end_user": "user_1",
        "operation": "embeddings",
        "model_asked": "alias",
        "latency_class": "batch",
        "service_tier": "flex",
        "started": "2026-09-21T14:13:20.000001Z",
        "prompt_tokens_estimate": 7,
        "policy_hash": POLICY.hash,
        "trace_id": f"{0xABC:032x}",
    }
    assert [msgspec.json.decode(msgspec.json.encode(each)) for each in noted] == [
        {**known, "event_id": noted[0].event_id, "deployment": "a"},
        {**known, "event_id": noted[1].event_id, "deployment": "b", "attempt": 2},
    ]
    assert noted[0].event_id < noted[1].event_id
    assert (opening.request_id, opening.request_id_at(first)) == ("req_1-2", "req_1")


class Ends(Limiter):
    """Counts. `waits`: as for a storage behind a socket, until as many wait as may."""

    def __init__(self, *, waits: bool) -> None:
        super().__init__(MemoryStorage(), LIMITS)
        self.ended = self.most_at_once = self._at_once = 0
        self._full = asyncio.Event()
        if not waits:
            self._full.set()

    async def end(self, name: str, actual: Sequence[int]) -> None:
        self.ended += 1
        self._at_once += 1
        self.most_at_once = max(self.most_at_once, self._at_once)
        if self._at_once == SETTLED_AT_ONCE:
            self._full.set()
        await self._full.wait()
        self._at_once -= 1


async def tasks_that_settle(directory: Path, limiter: Ends, reservations: int) -> int:
    tasks = 0

    class Counted(Settler):
        @staticmethod
        async def _settle_each(due: Iterator[tuple[Reservation, Usage, int, str]]) -> None:
            nonlocal tasks
            tasks += 1
            await Settler._settle_each(due)

    async with Ledger(directory, "replica") as ledger, asyncio.timeout(30):
        settler = Counted(limiter, ledger)
        ledger.append(a_receipt())
        for number in range(reservations):
            settler.settle(Reservation(limiter, f"r{number}", (), {}), Usage(), 0, "acme")
        await settler.stop()
    return tasks


async def test_as_many_are_settled_at_once_as_a_storage_may_be_asked(tmp_path: Path) -> None:
    limiter = Ends(waits=True)
    assert await tasks_that_settle(tmp_path, limiter, 3 * SETTLED_AT_ONCE) == SETTLED_AT_ONCE
    assert (limiter.ended, limiter.most_at_once) == (3 * SETTLED_AT_ONCE, SETTLED_AT_ONCE)


async def test_a_storage_that_nobody_waits_for_is_asked_by_one_task(tmp_path: Path) -> None:
    limiter = Ends(waits=False)
    assert await tasks_that_settle(tmp_path, limiter, 3 * SETTLED_AT_ONCE) == 1
    assert limiter.ended == 3 * SETTLED_AT_ONCE
