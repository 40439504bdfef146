"""Stored responses per tenant, which later requests continue by id (`previous_response_id`, `previous_message_id`).

The translator of a wire with stored responses is a `StoringTranslator`. The canonicaliser has it load the history that
a body refers to, and the exchange asks it for the last bytes of an answer, which it returns once the answer is stored.
So a client that has the whole answer can continue from it. No phase knows more of this.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol
from urllib.parse import quote

from gateway.core.errors import BodyTooLarge, Overloaded, StorageUnavailable, retry_after
from gateway.core.ids import random_bytes
from gateway.policy import Policy, Responses, Tenant
from gateway.storage.base import Document, DocumentStore, Grant, ReservationStore, SlotCharge

ROOM_RETRY_SECONDS = 1.0  # retry-after if the memory for bodies is full: calls end all the time
STORAGE_RETRY_SECONDS = 1.0

log = logging.getLogger("warmpath")


class Room(Protocol):
    """Memory budget for the bytes of all requests in flight."""

    held_bytes: int
    max_bytes: int

    def fits(self, count: int) -> bool: ...


class ResponseStorage(DocumentStore, ReservationStore, Protocol):
    """The parts of a storage engine that stored responses use."""


class ResponseStore:
    """The stored responses of all tenants. Bytes loaded for a call count against `room` until the call is over."""

    def __init__(self, documents: ResponseStorage, room: Room) -> None:
        self.documents = documents
        self.room = room
        self.ending: set[asyncio.Task[None]] = set()  # tasks that release claims; bounded by the calls in flight
        self.outcomes = {"kept": 0, "too_large": 0, "storage_away": 0}

    def of(self, tenant: Tenant, policy: Policy) -> TenantResponses | None:
        """The tenant's stored responses, or None if the policy stores none."""
        wanted = policy.responses_of(tenant)
        return None if wanted.keep == "off" else TenantResponses(self, tenant.name, wanted, wanted.keep)

    async def close(self) -> None:
        """Wait until all claims are released, or the storage has not answered in time."""
        await asyncio.gather(*self.ending)


class Claim:
    """The right to be the only request that continues a document. It ends with its lease at the latest."""

    def __init__(self, response_store: ResponseStore, reservation: str) -> None:
        self._response_store = response_store
        self._reservation = reservation

    def release(self) -> None:
        """Let other requests continue the document, as soon as the storage answers."""
        task = asyncio.get_running_loop().create_task(self._settle())
        self._response_store.ending.add(task)
        task.add_done_callback(self._response_store.ending.discard)

    async def _settle(self) -> None:
        with contextlib.suppress(StorageUnavailable):  # the lease ends by itself
            await self._response_store.documents.settle(self._reservation, [0], now=time.time())


class TenantResponses:
    """One tenant's stored responses. Reads and deletes raise `StorageUnavailable`; `put` never raises."""

    def __init__(self, response_store: ResponseStore, tenant: str, wanted: Responses, keep_seconds: float) -> None:
        self._response_store = response_store
        self._documents = response_store.documents
        self._tenant = tenant
        self._wanted = wanted
        self._keep_seconds = keep_seconds
        self._held_bytes = 0

    async def put(self, name: str, document: Document, *, call_id: str) -> bool:
        """Store a response; return whether it was stored. A failure is logged, and the answer is sent all the same."""
        outcome, why = await self.try_to_put(name, document)
        self._response_store.outcomes[outcome] += 1
        if outcome != "kept":
            log.warning("a response was not stored: %s", why, extra={"call_id": call_id, "tenant": self._tenant})
        return outcome == "kept"

    async def try_to_put(self, name: str, document: Document) -> tuple[str, str]:
        """Store a response. Returns the outcome (a key of `ResponseStore.outcomes`), and the reason for the log."""
        size, most = len(document.head) + len(document.body), self._wanted.max_response_bytes
        if size > most:
            return "too_large", f"it has {size} bytes with its input; the limit is {most}"
        try:
            kept = await self._documents.put_document(
                self._tenant, name, document, ttl_seconds=self._keep_seconds, max_bytes=self._wanted.max_stored_bytes
            )
        except StorageUnavailable as error:
            return "storage_away", error.message
        return ("kept", "") if kept else ("too_large", f"the storage has no room for {size} bytes")

    async def get(self, name: str) -> Document | None:
        try:
            return await self._documents.get_document(self._tenant, name)
        except StorageUnavailable as error:
            raise _later(error) from error

    async def heads(self, names: Sequence[str]) -> list[bytes | None]:
        try:
            return await self._documents.get_heads(self._tenant, names)
        except StorageUnavailable as error:
            raise _later(error) from error

    @property
    def conversations(self) -> TenantResponses:
        """The tenant's conversations, which have the same bounds as its responses, apart from them."""
        return TenantResponses(
            self._response_store, conversations_space(self._tenant), self._wanted, self._keep_seconds
        )

    @property
    def chats(self) -> TenantResponses:
        """The tenant's chat completions, which have the same bounds as its responses, apart from them."""
        return TenantResponses(self._response_store, chats_space(self._tenant), self._wanted, self._keep_seconds)

    @property
    def threads(self) -> TenantResponses:
        """The turns of the tenant's threads, which have the same bounds as its responses, apart from them."""
        return TenantResponses(self._response_store, threads_space(self._tenant), self._wanted, self._keep_seconds)

    async def claim(self, name: str, *, lease_seconds: float) -> Claim | None:
        """Claim a document that need not exist. None if another request has claimed it, at any gateway."""
        slot = f"{quote(self._tenant, safe='')}/claim/{name}"
        reservation = f"{slot}/{random_bytes(8).hex()}"
        try:
            verdict = await self._documents.reserve(
                reservation, [SlotCharge(slot, 1)], lease_seconds=lease_seconds, now=time.time()
            )
        except StorageUnavailable as error:
            raise _later(error) from error
        return Claim(self._response_store, reservation) if isinstance(verdict, Grant) else None

    def count(self, outcome: str) -> None:
        """Count what happened to something that was to be stored."""
        self._response_store.outcomes[outcome] += 1

    @property
    def max_bytes(self) -> int:
        """The most bytes of one document."""
        return self._wanted.max_response_bytes

    async def names(
        self, folder: str, *, after: str | None = None, limit: int, newest_first: bool = False
    ) -> list[str]:
        """List the documents of a folder. See `DocumentStore.list_documents`."""
        try:
            return await self._documents.list_documents(
                self._tenant, folder, after=after, limit=limit, newest_first=newest_first
            )
        except StorageUnavailable as error:
            raise _later(error) from error

    async def keep(self, folder: str) -> None:
        """Let the documents of a folder expire as late as a new document."""
        try:
            await self._documents.keep_folder(self._tenant, folder, ttl_seconds=self._keep_seconds)
        except StorageUnavailable as error:
            raise _later(error) from error

    async def put_or_raise(self, name: str, document: Document, *, param: str) -> None:
        """Store a document. Raises `BodyTooLarge` or `StorageUnavailable`."""
        self.check(*await self.try_to_put(name, document), param=param)

    def check(self, outcome: str, why: str, *, param: str) -> None:
        """Raise what an outcome means for a client whose object could not be stored."""
        if outcome == "storage_away":
            raise _later(StorageUnavailable(why))
        if outcome != "kept":
            raise BodyTooLarge(f"{param}: {why}", param=param)

    async def delete(self, name: str) -> bool:
        """Delete a response; return whether it existed."""
        try:
            return await self._documents.delete_document(self._tenant, name)
        except StorageUnavailable as error:
            raise _later(error) from error

    def hold(self, count: int) -> None:
        """Reserve memory for a history that is about to be loaded. Raises `Overloaded`."""
        if not self._response_store.room.fits(count):
            raise Overloaded(
                "not enough memory to load the conversation that this request continues; try again shortly",
                retry_after_seconds=ROOM_RETRY_SECONDS,
            )
        self._response_store.room.held_bytes += count
        self._held_bytes += count

    def release(self) -> None:
        """Release the memory. Safe to call twice."""
        self._response_store.room.held_bytes -= self._held_bytes
        self._held_bytes = 0


class StoringTranslator(ABC):
    """A translator of one exchange on a wire whose answers are stored."""

    must_store = False  # True while the last bytes of the answer wait for `store_and_finish`
    large = False  # the body and the history are so large that work on them must run in the worker thread

    def use_policy(self, policy: Policy) -> None:  # noqa: B027 - optional
        """Called before `read`, with the policy under which the request runs."""

    @abstractmethod
    async def load_history(self, body: bytes, tenant_responses: TenantResponses) -> None:
        """Load the stored responses that a body refers to. Called before `read` if the policy stores responses.

        Sets `large`. Raises a `GatewayError`."""

    @abstractmethod
    async def store_and_finish(self) -> bytes:
        """Store the answer, then return its last bytes."""

    @abstractmethod
    def release(self) -> None:
        """The exchange is over; release what was loaded. Safe to call twice."""


def conversations_space(tenant: str) -> str:
    """Name under which the storage has a tenant's conversations."""
    return f"conversations/{tenant}"


def chats_space(tenant: str) -> str:
    """Name under which the storage has a tenant's chat completions."""
    return f"chats/{tenant}"


def threads_space(tenant: str) -> str:
    """Name under which the storage has the turns of a tenant's threads."""
    return f"threads/{tenant}"


def _later(error: StorageUnavailable) -> StorageUnavailable:
    """A retryable error: whether the response exists is unknown, so this must not be a 404."""
    return StorageUnavailable(error.message, headers=retry_after(STORAGE_RETRY_SECONDS))
