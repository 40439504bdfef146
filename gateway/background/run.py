"""Runs one response in the background: the phases of `gateway.serve` with a client that is not there.

The run is a stream whose client is a `RunWire`. Its events go to an `EventLog`. A response is stored when it is queued,
when it is in progress, and when it ends. While it runs, `_watch` writes events, extends the run's lease and looks
whether another gateway wants it to be cancelled.

A cancelled run ends like a call whose client has disconnected, and is billed like one. Each run has one receipt.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NoReturn, cast

import msgspec
from starlette.types import Message

from gateway.background.events import EventLog, StoredEvents
from gateway.background.lease import EXTEND_SECONDS, RunLease
from gateway.core.errors import BadRequest, GatewayError, InternalError, StorageUnavailable, shutting_down
from gateway.deployments.slot_permit import SlotPermit
from gateway.endpoints.exchange import Exchange
from gateway.endpoints.responses.background import BackgroundEndpoint, BackgroundTranslator
from gateway.endpoints.responses.response import UNFINISHED
from gateway.endpoints.responses.stored import failed_document
from gateway.endpoints.wire import WIRE, Wire
from gateway.prompts.reader import BodyReader
from gateway.queueing import Queue
from gateway.response_store import ResponseStore, TenantResponses
from gateway.serve import Components, handle, serve
from gateway.storage.base import Document
from gateway.telemetry import CallRecord
from gateway.types import Call

TICK_SECONDS = 1.0  # how often events are written and cancellations by other gateways are noticed
STORE_SECONDS = 60.0  # how long an ended run tries to store its response while the storage is unavailable

log = logging.getLogger("warmpath")


class RunWire:
    """The client's side of a run: gives the body, and passes the events of the stream to `received`."""

    def __init__(self, body: bytes, received: Callable[[bytes], None]) -> None:
        self._body = body
        self._received = received
        self._status = 0
        self._tell: Callable[[], None] | None = None

    def whole_body(self) -> bytes | None:
        return self._body

    def begin(self, status: int, lines: bytes, *, length: int | None, close: bool) -> bool:
        self._status = status
        return True

    def write(self, chunk: bytes, last: bool) -> bool:
        if self._status == 200:  # the body of another status is an error, which the run knows already
            self._received(chunk)
        return True

    def coded_writer(self) -> None:
        """Return None, because there is no transfer coding."""

    def when_gone(self, tell: Callable[[], None] | None) -> None:
        self._tell = tell

    def leave(self) -> None:
        """Disconnect, which cancels the call."""
        if self._tell is not None:
            self._tell()


class _AnnouncingQueue:
    """Tells a run when its call is queued and when it has a slot."""

    def __init__(self, queue: Queue, run: BackgroundRun) -> None:
        self._queue = queue
        self._run = run

    async def acquire_slot(self, call: Call) -> SlotPermit:
        await self._run.queued()
        permit = await self._queue.acquire_slot(call)
        self._run.started()
        return permit


class BackgroundRun:
    """One response in the background. `accepted` is done when it is stored as queued, or fails with its error.

    `marker_exists` tells whether another gateway wants it to be cancelled.
    """

    def __init__(
        self,
        response_id: str,
        *,
        response_store: ResponseStore,
        events: StoredEvents,
        lease: RunLease,
        marker_exists: Callable[[], Any],
    ) -> None:
        self.id = response_id
        self.log = EventLog(events)
        self.accepted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.ended = asyncio.Event()
        self._response_store = response_store
        self._lease = lease
        self._marker_exists = marker_exists
        self._endpoint = BackgroundEndpoint(self._store_final)
        self._wire: RunWire | None = None
        self._responses: TenantResponses | None = None
        self._queued_document: Document | None = None  # set once the response is accepted
        self._queued_json = b""
        self._final_document: Document | None = None
        self._error: GatewayError | None = None
        self._cancelled = False
        self._changed = False  # the status has changed since the response was stored
        self._finishing = False
        self._storing = asyncio.Lock()  # the states of the response are stored in their order
        self._wake = asyncio.Event()

    @property
    def _translator(self) -> BackgroundTranslator:
        assert self._endpoint.running is not None
        return self._endpoint.running

    @property
    def accepted_json(self) -> bytes:
        """The response for the client's request: queued, or complete if it was answered from the cache."""
        return self._queued_json or self._translator.response_json

    async def run(self, components: Components, headers: list[tuple[bytes, bytes]], body: bytes, call_id: str) -> None:
        """Run the call to its end. Raises nothing; a cancellation of the task makes the response fail."""
        wire = self._wire = RunWire(body, self._received)
        client_side: Wire = wire
        scope = {
            "type": "http",
            "method": "POST",
            "path": "/v1/responses",
            "headers": headers,
            "extensions": {WIRE: client_side},
        }

        async def receive() -> Message:
            return {"type": "http.request", "body": body, "more_body": False}

        # The phases use nothing else of the queue.
        queue = cast(Queue, _AnnouncingQueue(components.queue, self))
        watching = asyncio.create_task(self._watch(), name=f"background {self.id}")
        try:
            await handle(
                replace(components, queue=queue), self._endpoint, scope, receive, _never_send,
                call_id=call_id, story=self._story,
            )  # fmt: skip
        except asyncio.CancelledError:
            self._fail(shutting_down())
        finally:
            self._finishing = True
            self._wake.set()
            try:
                await watching
            finally:  # also if the gateway stops meanwhile
                await self._finish()

    async def queued(self) -> None:
        """Store the response as queued, which accepts the request. Raises `BadRequest` or `StorageUnavailable`."""
        translator = self._translator
        frames, self._responses = translator.queued(), translator.tenant_responses
        document = await translator.document()
        outcome, why = await self._responses.try_to_put(self.id, document)
        if outcome == "storage_away":
            raise StorageUnavailable(why)
        if outcome != "kept":
            raise BadRequest(f"background: the response could not be stored: {why}", param="background")
        self._queued_document = document
        self._queued_json = translator.response_json
        self.log.add(frames)
        self.accepted.set_result(None)

    def started(self) -> None:
        """The call has a slot."""
        if not self._cancelled:
            self.log.add(self._translator.started())
            self._changed = True
            self._wake.set()

    async def cancel(self) -> None:
        """Cancel the run, unless its answer is complete. The response is stored as cancelled when this returns."""
        async with self._storing:
            if self._cancelled or self._final_document is not None or self._error is not None:
                return
            self._cancelled = True
            self._translator.cancel()
            self._final_document = await self._translator.document()
            self.log.end()
            assert self._wire is not None
            self._wire.leave()
            await self._put(self._final_document)

    async def _story(
        self, components: Components, reader: BodyReader, exchange: Exchange, record: CallRecord, call_id: str
    ) -> None:
        """Serve the call, and note how it fails."""
        try:
            await serve(components, reader, exchange, record, call_id)
        except asyncio.CancelledError:
            if not self._cancelled:
                self._fail(shutting_down())
            raise
        except Exception as error:
            self._fail(error if isinstance(error, GatewayError) else InternalError("an error in the gateway"))
            raise

    def _fail(self, error: GatewayError) -> None:
        if self._error is None and not self._cancelled:
            self._error = error
        if not self.accepted.done():
            self.accepted.set_exception(error)

    def _received(self, frames: bytes) -> None:
        if not self._cancelled:
            self.log.add(frames)
            if self.log.has_full_part:
                self._wake.set()

    async def _watch(self) -> None:
        """Store what has changed, extend the lease and look for a cancellation, until the run ends."""
        extend_at = time.monotonic() + EXTEND_SECONDS
        while not self._finishing:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(TICK_SECONDS):
                    await self._wake.wait()
            self._wake.clear()
            if self._queued_document is None or self._finishing:
                continue
            with contextlib.suppress(StorageUnavailable):  # the next turn tries again
                await self._store_state()
                await self.log.write()
                if time.monotonic() >= extend_at:
                    await self._lease.extend()
                    extend_at = time.monotonic() + EXTEND_SECONDS
                if await self._marker_exists():
                    await self.cancel()

    async def _store_state(self) -> None:
        async with self._storing:
            if not self._changed or self._final_document is not None or self._responses is None:
                return
            self._changed = False
            outcome, why = await self._responses.try_to_put(self.id, await self._translator.document())
            if outcome == "storage_away":
                self._changed = True
                raise StorageUnavailable(why)

    async def _store_final(self, responses: TenantResponses, document: Document) -> bool:
        """Store the complete response. Returns whether it was stored."""
        async with self._storing:
            if self._cancelled:
                return False
            self._responses, self._final_document = responses, document
            return await self._put(document)

    async def _put(self, document: Document) -> bool:
        """Store the last state of the response. If it is too large, store that it failed."""
        assert self._responses is not None
        until = time.monotonic() + STORE_SECONDS
        outcome, why = await self._responses.try_to_put(self.id, document)
        while outcome == "storage_away" and time.monotonic() < until:
            await asyncio.sleep(TICK_SECONDS)
            outcome, why = await self._responses.try_to_put(self.id, document)
        self._response_store.outcomes[outcome] += 1
        if outcome != "kept":
            log.warning("a response in the background was not stored: %s", why, extra={"response": self.id})
        if outcome == "too_large" and self._queued_document is not None:
            await self._responses.try_to_put(self.id, failed_document(self._queued_document, why))
        return outcome == "kept"

    async def _finish(self) -> None:
        """Store how the run ended, if that is not stored, and release its lease."""
        try:
            if self._queued_document is not None and self._final_document is None:
                await self._end_failed(self._error or InternalError("an error in the gateway"))
            if not self.accepted.done():
                self.accepted.set_result(None)  # answered from the cache, without a slot
            self.log.end()
            if self._queued_document is not None or self._final_document is not None:
                with contextlib.suppress(StorageUnavailable):
                    await self.log.write()
        finally:
            self.log.end()
            self.ended.set()
            await self._lease.release()

    async def _end_failed(self, error: GatewayError) -> None:
        """The call failed. Its stream has a last event if it had begun."""
        translator = self._translator
        if translator.status in UNFINISHED:
            self.log.add(translator.failure(error))
        async with self._storing:
            self._final_document = await translator.document(error)
            await self._put(self._final_document)


def stream_body(fields: dict[str, msgspec.Raw]) -> bytes:
    """Return the body of a run, which is a stream."""
    return msgspec.json.encode({**fields, "stream": True})


async def _never_send(message: Message) -> NoReturn:
    raise AssertionError(f"the wire accepts everything, but {message['type']} was sent beside it")
