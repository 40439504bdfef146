"""Where answers are kept that later requests refer to: the seam between a wire that remembers and all that does not.

A translator of such a wire is a `StoringTranslator`. The canonicaliser has it `recall` what a body refers to, and the
exchange asks it for the `rest` of an answer's last bytes, which it gives once the answer is stored. So a client that
has the whole answer can continue from it. No phase knows more of this.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol

from gateway.core.errors import Overloaded, StorageUnavailable, retry_after
from gateway.policy import Policy, Responses, Tenant
from gateway.storage.base import Document, DocumentStore

ROOM_RETRY_SECONDS = 1.0  # when what found no room may: calls end all the time
STORAGE_RETRY_SECONDS = 1.0

log = logging.getLogger("warmpath")


class Room(Protocol):
    """For the bytes of all requests that are held at once."""

    held_bytes: int

    def fits(self, count: int) -> bool: ...


class ResponseStore:
    """Those of all tenants. What is read from them for a call is held in `room` until the call is over."""

    def __init__(self, documents: DocumentStore, room: Room) -> None:
        self.documents = documents
        self.room = room
        self.outcomes = {"kept": 0, "too_large": 0, "storage_away": 0}

    def of(self, tenant: Tenant, policy: Policy) -> TenantResponses | None:
        """None where nothing is kept."""
        wanted = policy.responses_of(tenant)
        return None if wanted.keep == "off" else TenantResponses(self, tenant.name, wanted, wanted.keep)


class TenantResponses:
    """One tenant's. Raises `StorageUnavailable` where something is asked for."""

    def __init__(self, response_store: ResponseStore, tenant: str, wanted: Responses, keep_seconds: float) -> None:
        self._response_store = response_store
        self._documents = response_store.documents
        self._tenant = tenant
        self._wanted = wanted
        self._keep_seconds = keep_seconds
        self._held_bytes = 0

    async def put(self, name: str, document: Document, *, call_id: str) -> bool:
        """Whether it is kept. Nobody's answer fails for that: where it is not, the log says why."""
        outcome, why = await self._put(name, document)
        self._response_store.outcomes[outcome] += 1
        if outcome != "kept":
            log.warning("a response is not kept: %s", why, extra={"call_id": call_id, "tenant": self._tenant})
        return outcome == "kept"

    async def _put(self, name: str, document: Document) -> tuple[str, str]:
        """What has become of it, and why."""
        size, most = len(document.head) + len(document.body), self._wanted.max_response_bytes
        if size > most:
            return "too_large", f"it has {size} bytes with its input, and may have {most}"
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

    async def delete(self, name: str) -> bool:
        """Whether it was there."""
        try:
            return await self._documents.delete_document(self._tenant, name)
        except StorageUnavailable as error:
            raise _later(error) from error

    def hold(self, count: int) -> None:
        """Take room for what is about to be read. Raises `Overloaded`."""
        if not self._response_store.room.fits(count):
            raise Overloaded(
                "there is no room for what this request goes on from beside the requests that are here",
                retry_after_seconds=ROOM_RETRY_SECONDS,
            )
        self._response_store.room.held_bytes += count
        self._held_bytes += count

    def let_go(self) -> None:
        """Give the room back. Safe to call twice."""
        self._response_store.room.held_bytes -= self._held_bytes
        self._held_bytes = 0


class StoringTranslator(ABC):
    """A translator of one exchange, on a wire whose answers are kept."""

    waits = False  # its last bytes are not whole yet: `rest` has the others

    @abstractmethod
    async def recall(self, body: bytes, tenant_responses: TenantResponses) -> None:
        """Before `read`, where the policy keeps answers: get what the body refers to. Raises a `GatewayError`."""

    @abstractmethod
    async def rest(self) -> bytes:
        """Keep the answer, and then say its end."""

    @abstractmethod
    def let_go(self) -> None:
        """The exchange is over. Safe to call twice."""


def _later(error: StorageUnavailable) -> StorageUnavailable:
    """It is not known whether it is there: not to be taken for an answer."""
    return StorageUnavailable(error.message, headers=retry_after(STORAGE_RETRY_SECONDS))
