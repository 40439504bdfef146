"""Follows the events of one response in the background: from the memory of this process, or from the storage."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping

import msgspec

from gateway.background.events import StoredEvents, wait_at_most
from gateway.background.lease import RunLease
from gateway.background.run import BackgroundRun
from gateway.core.errors import StorageUnavailable
from gateway.endpoints.responses.response import UNFINISHED
from gateway.endpoints.responses.stored import failed_document, response_of, state_of
from gateway.storage.base import Document, Storage

POLL_SECONDS = 0.25  # how often a follower looks for events of another gateway; doubles up to the next
POLL_SECONDS_MAX = 1.0
KEEP_ALIVE_SECONDS = 15.0  # a follower without events gets a comment, so that its connection stays open
KEEP_ALIVE = b": keep-alive\n\n"
GATEWAY_DIED = "the gateway that ran this response has stopped"


class Follower:
    """Reads the events of one response, from the event `number` on. `runs` are those of this process."""

    def __init__(
        self,
        storage: Storage,
        runs: Mapping[str, BackgroundRun],
        events: StoredEvents,
        tenant: str,
        name: str,
        number: int,
    ) -> None:
        self._storage = storage
        self._runs = runs
        self._events = events
        self._tenant = tenant
        self._name = name
        self._number = number  # of the next event
        self._lease = RunLease(storage, tenant, name)
        self._pause = POLL_SECONDS
        self._silent_since = time.monotonic()

    async def frames(self) -> AsyncIterator[bytes]:
        """Yield frames until the response has ended.

        If events must be read from the storage and it is unavailable, yield only keep-alive comments until it is back.
        """
        has_ended, last = False, b""
        while True:
            ended_before, frames = has_ended, list[bytes]()
            try:
                frames = await self._next()
                if not frames and not ended_before:
                    has_ended, last = await self._wait()
            except StorageUnavailable:
                await self._sleep()
            if frames:
                self._number += len(frames)
                self._silent_since, self._pause = time.monotonic(), POLL_SECONDS
                yield b"".join(frames)
            elif last or ended_before:
                if last:
                    yield last
                return
            elif time.monotonic() - self._silent_since >= KEEP_ALIVE_SECONDS:
                self._silent_since = time.monotonic()
                yield KEEP_ALIVE

    async def _next(self) -> list[bytes]:
        """The next events that exist. None are skipped, unless they are lost."""
        run = self._runs.get(self._name)
        if run is not None and self._number >= run.log.first:
            return run.log.since(self._number)
        found = await self._events.since(self._number)
        if found is None:
            if run is not None:
                self._number = run.log.first
            return []
        self._number = found[0]
        return found[1]

    async def _wait(self) -> tuple[bool, bytes]:
        """Wait for events. Returns whether the response has ended, and the last event if its gateway has died."""
        run = self._runs.get(self._name)
        if run is not None:
            if not run.log.ended and self._number >= run.log.next:
                await wait_at_most(run.log, KEEP_ALIVE_SECONDS)
            return run.log.ended, b""
        if await self._lease.is_held():  # its last events may be missing even if the response is stored as ended
            await self._sleep()
            return False, b""
        document = await self._storage.get_document(self._tenant, self._name)
        has_died = document is not None and state_of(document) in UNFINISHED
        return True, _failed_event(self._number, document) if document is not None and has_died else b""

    async def _sleep(self) -> None:
        await asyncio.sleep(self._pause)
        self._pause = min(2 * self._pause, POLL_SECONDS_MAX)


def _failed_event(number: int, document: Document) -> bytes:
    response = msgspec.Raw(response_of(failed_document(document, GATEWAY_DIED)))
    event = {"type": "response.failed", "sequence_number": number, "response": response}
    return b"event: response.failed\ndata: %b\n\n" % msgspec.json.encode(event)
