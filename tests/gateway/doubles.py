"""Scripted deployments, and a storage, a ledger and a telemetry that tests can observe or let fail."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Mapping, Sequence

from gateway.billing.ledger import Ledger
from gateway.billing.ledger.rows import AppendedRow
from gateway.core.errors import LedgerUnavailable, StorageUnavailable
from gateway.providers.base import UpstreamResponse
from gateway.storage.base import Charge, Document, Grant, Rejection
from gateway.storage.memory import MemoryStorage
from gateway.telemetry import CallRecord, Telemetry
from gateway.types import Call
from tests.gateway.silent_provider import SilentProvider

_numbers = itertools.count()  # of replies, in the order in which they were opened


class ScriptedResponse(UpstreamResponse):
    """An upstream response that a test fills step by step."""

    def __init__(self, call: Call) -> None:
        self.call = call
        self.number = next(_numbers)
        self.closed = 0
        self.slow_to_close: asyncio.Event | None = None
        self._words: asyncio.Queue[bytes | Exception | None] = asyncio.Queue()

    def say(self, *words: bytes | Exception | None) -> None:
        """Send chunks; an exception fails the response; None ends the connection."""
        for word in words:
            self._words.put_nowait(word)

    async def __anext__(self) -> bytes:
        word = await self._words.get()
        if word is None:
            raise StopAsyncIteration
        if isinstance(word, Exception):
            raise word
        return word

    async def aclose(self) -> None:
        self.closed += 1
        if self.slow_to_close is not None:
            await self.slow_to_close.wait()


class ScriptedProvider(SilentProvider):
    """A provider whose responses send `script` at once; without a script, the test fills each response."""

    has_usage_records = True
    continues_final_message = True

    def __init__(self) -> None:
        self.script: tuple[bytes | Exception | None, ...] = ()
        self.replies: list[ScriptedResponse] = []
        self.record: bytes | None = None
        self.prompt_tokens: int | None = None  # what its tokenizer would count
        self.tokens_of_text: Callable[[str], int] | None = None  # its tokenizer, for generated text
        self.asked_for_records = asyncio.Event()
        self.asked_for: list[str] = []  # request ids
        self.record_may_come: asyncio.Event | None = None

    async def open(self, call: Call, *, headers: Mapping[str, str], body: bytes | None = None) -> UpstreamResponse:
        reply = ScriptedResponse(call)
        self.replies.append(reply)
        reply.say(*self.script)
        return reply

    async def recorded_usage(self, call_id: str, *, patient: bool = False) -> bytes | None:
        self.asked_for_records.set()
        self.asked_for.append(call_id)
        if self.record_may_come is not None:
            await self.record_may_come.wait()
        return self.record

    async def count_prompt_tokens(self, call: Call) -> int | None:
        return self.prompt_tokens

    async def count_text_tokens(self, text: str) -> int | None:
        return None if self.tokens_of_text is None else self.tokens_of_text(text)


class CountingStorage(MemoryStorage):
    """Counts how often each reservation ended. `documents_away` makes its document store fail."""

    def __init__(self) -> None:
        super().__init__()
        self.documents_away = False
        self.granted: set[str] = set()
        self.ended: list[str] = []

    async def reserve(
        self, reservation_id: str, charges: Sequence[Charge], *, lease_seconds: float, now: float
    ) -> Grant | Rejection:
        verdict = await super().reserve(reservation_id, charges, lease_seconds=lease_seconds, now=now)
        if isinstance(verdict, Grant):
            self.granted.add(reservation_id)
        return verdict

    async def force_reserve(
        self, reservation_id: str, charges: Sequence[Charge], *, lease_seconds: float, now: float
    ) -> None:
        await super().force_reserve(reservation_id, charges, lease_seconds=lease_seconds, now=now)
        self.granted.add(reservation_id)

    async def settle(self, reservation_id: str, actual: Sequence[int], *, now: float) -> bool:
        ended = await super().settle(reservation_id, actual, now=now)
        if ended:
            self.ended.append(reservation_id)
        return ended

    async def put_document(
        self, tenant: str, name: str, document: Document, *, ttl_seconds: float, max_bytes: int
    ) -> bool:
        self._check_documents()
        return await super().put_document(tenant, name, document, ttl_seconds=ttl_seconds, max_bytes=max_bytes)

    async def get_document(self, tenant: str, name: str) -> Document | None:
        self._check_documents()
        return await super().get_document(tenant, name)

    async def get_heads(self, tenant: str, names: Sequence[str]) -> list[bytes | None]:
        self._check_documents()
        return await super().get_heads(tenant, names)

    async def delete_document(self, tenant: str, name: str) -> bool:
        self._check_documents()
        return await super().delete_document(tenant, name)

    def _check_documents(self) -> None:
        if self.documents_away:
            raise StorageUnavailable("the storage is away")


class FaultyLedger(Ledger):
    """Fails every write while `fault_ahead` is set, like a full disk."""

    fault_ahead = False
    has_failed = False

    def append(self, row: AppendedRow) -> None:
        if self.fault_ahead:
            self.has_failed = True
            raise LedgerUnavailable("the disk is full")
        super().append(row)


class RecordingTelemetry(Telemetry):
    """Keeps every call record."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[CallRecord] = []

    def record(self, record: CallRecord) -> None:
        self.records.append(record)
        super().record(record)
