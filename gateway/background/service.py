"""Starts responses in the background, finds out how they are, cancels them, and follows their events.

`BackgroundService.accept` wraps the handler of /v1/responses. The methods below it are for the routes that read stored
responses. A gateway that does not run a response knows it by the storage alone: its document, its events and its lease.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec

from gateway.background.canonicaliser import RUN_HEADERS_DROPPED
from gateway.background.events import StoredEvents, events_space
from gateway.background.follower import GATEWAY_DIED, POLL_SECONDS, Follower
from gateway.background.lease import RunLease
from gateway.background.run import BackgroundRun, stream_body
from gateway.core.errors import BadRequest, LimitReached, Overloaded, StorageUnavailable
from gateway.endpoints.exchange import Exchange
from gateway.endpoints.responses import ResponsesTranslator
from gateway.endpoints.responses.response import UNFINISHED
from gateway.endpoints.responses.stored import failed_document, response_of, state_of
from gateway.endpoints.wire import JSON_TYPE, STREAM_TYPE
from gateway.policy import Background, Policy, Responses, Tenant
from gateway.policy.file import PolicyHolder
from gateway.prompts.canonicaliser import Canonicaliser
from gateway.prompts.reader import BodyReader, read_fields
from gateway.response_store import ResponseStore, TenantResponses
from gateway.serve import Components, RequestHandler
from gateway.storage.base import Document, Storage
from gateway.telemetry import CallRecord
from gateway.types import Outcome

RUNS_MAX = 1000  # responses in the background that one process runs
FOLLOWERS_MAX = 1000  # streams of events that one process sends
TENANT_FOLLOWERS_MAX = 100  # of them, those of one tenant
CANCEL_SECONDS = 5.0  # how long a cancellation waits for the gateway that runs the response
MARKER_SECONDS = 300.0
RETRY_SECONDS = 1.0

BOOLEANS = (b"true", b"false", b"null")


class BackgroundService:
    """The responses in the background of one process."""

    def __init__(
        self, storage: Storage, response_store: ResponseStore, policies: PolicyHolder, canonicaliser: Canonicaliser
    ) -> None:
        """`canonicaliser` gives the calls of runs their time bounds."""
        self._storage = storage
        self._response_store = response_store
        self._policies = policies
        self._canonicaliser = canonicaliser
        self._runs: dict[str, BackgroundRun] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._followers = Counter[str]()  # streams of events that are sent, by tenant

    @property
    def running(self) -> int:
        """How many responses this process runs."""
        return len(self._runs)

    async def close(self, drain_seconds: float = 0.0) -> None:
        """Let the runs end within this time. Then cut them off: their responses fail."""
        if self._tasks and drain_seconds > 0:
            await asyncio.wait([*self._tasks.values()], timeout=drain_seconds)
        tasks = [*self._tasks.values()]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    def accept(self, story: RequestHandler) -> RequestHandler:
        """Wrap the handler of /v1/responses: a request with `background: true` is answered when it is queued."""

        def handler(
            components: Components, reader: BodyReader, exchange: Exchange, record: CallRecord, call_id: str
        ) -> Coroutine[Any, Any, None]:
            return self._accept(story, components, reader, exchange, record, call_id)

        return handler

    async def _accept(
        self,
        story: RequestHandler,
        components: Components,
        reader: BodyReader,
        exchange: Exchange,
        record: CallRecord,
        call_id: str,
    ) -> None:
        try:
            await story(components, reader, exchange, record, call_id)
            return
        except BadRequest:
            if not isinstance(reader, ResponsesTranslator) or reader.background_body is None:
                raise
            body = reader.background_body
        assert record.principal is not None
        record.operation = None  # the run is the model call
        tenant, fields = record.principal.tenant, read_fields(body)
        run = await self._start(components, tenant, exchange, fields, body, call_id)
        await asyncio.shield(run.accepted)
        record.outcome = Outcome.COMPLETE
        if bytes(fields.get("stream", b"")) != b"true":
            answer = run.accepted_json
            await exchange.replay(200, JSON_TYPE, {}, length=len(answer))
            await exchange.send(answer, last=True)
            return
        exchange.watch()
        await exchange.replay(200, STREAM_TYPE, {}, length=None)
        settings = self._policies.current.responses_of(tenant)
        async with contextlib.aclosing(self._follow(tenant.name, settings, run.id, 0)) as events:
            async for frames in events:
                await exchange.send(frames)
        await exchange.send(b"", last=True)

    async def _start(
        self,
        components: Components,
        tenant: Tenant,
        exchange: Exchange,
        fields: dict[str, msgspec.Raw],
        body: bytes,
        call_id: str,
    ) -> BackgroundRun:
        if len(self._runs) >= RUNS_MAX:
            raise Overloaded(
                f"{RUNS_MAX} responses are queued or in progress in the background of this gateway",
                retry_after_seconds=RETRY_SECONDS,
            )
        settings = self._policies.current.responses_of(tenant).background
        response_id = f"resp_{call_id.removeprefix('req_')}"
        lease = RunLease(self._storage, tenant.name, response_id)
        run = self._runs[response_id] = BackgroundRun(
            response_id,
            response_store=self._response_store,
            events=self._events(tenant.name, settings, response_id),
            lease=lease,
            marker_exists=partial(self._take_marker, tenant.name, response_id),
        )
        try:
            await lease.take(settings.max_open)
        except BaseException:
            self._forget(response_id)
            raise
        run.accepted.add_done_callback(lambda accepted: accepted.cancelled() or accepted.exception())
        if bytes(fields.get("stream", b"null")) in BOOLEANS:  # otherwise the body is refused
            body = stream_body(fields)
        headers = [(name, value) for name, value in exchange.headers.items() if name not in RUN_HEADERS_DROPPED]
        run_components = replace(components, canonicaliser=self._canonicaliser)
        task = asyncio.create_task(run.run(run_components, headers, body, call_id), name=f"run {response_id}")
        self._tasks[response_id] = task
        task.add_done_callback(lambda _: self._forget(response_id))
        return run

    def _forget(self, response_id: str) -> None:
        self._runs.pop(response_id, None)
        self._tasks.pop(response_id, None)

    def _events(self, tenant: str, settings: Background, response_id: str) -> StoredEvents:
        return StoredEvents(
            self._storage,
            tenant,
            response_id,
            keep_seconds=settings.keep_events,
            max_bytes=settings.max_event_bytes,
        )

    async def _take_marker(self, tenant: str, response_id: str) -> bool:
        """Whether another gateway wants the response to be cancelled."""
        (marker,) = await self._storage.get_heads(events_space(tenant), [_marker(response_id)])
        return marker is not None

    # For the routes of stored responses

    async def current(self, tenant: Tenant, responses: TenantResponses, name: str, document: Document) -> Document:
        """Return the current document of a response. It says `failed` if the gateway that ran the response has died."""
        if state_of(document) not in UNFINISHED or name in self._runs:
            return document
        if await RunLease(self._storage, tenant.name, name).is_held():
            return document
        document = await responses.get(name) or document  # it may have ended before its lease was released
        return failed_document(document, GATEWAY_DIED) if state_of(document) in UNFINISHED else document

    async def cancel(self, tenant: Tenant, responses: TenantResponses, name: str, document: Document) -> Document:
        """Cancel a response, and return its document. A response that has ended does not change."""
        if not _is_background(document):
            raise BadRequest("only a response that was created with `background: true` can be cancelled", param="id")
        document = await self.current(tenant, responses, name, document)
        if state_of(document) not in UNFINISHED:
            return document
        if (run := self._runs.get(name)) is not None:
            await run.cancel()
            return await responses.get(name) or document
        marker = Document(b"cancel", b"")
        bound = self._policies.current.responses_of(tenant).background.max_event_bytes
        await self._storage.put_document(
            events_space(tenant.name), _marker(name), marker, ttl_seconds=MARKER_SECONDS, max_bytes=bound
        )
        until = time.monotonic() + CANCEL_SECONDS
        while state_of(document) in UNFINISHED and time.monotonic() < until:
            await asyncio.sleep(POLL_SECONDS)
            found = await responses.get(name)
            if found is None:
                break
            document = await self.current(tenant, responses, name, found)
        return document

    async def delete(self, tenant: Tenant, responses: TenantResponses, name: str, document: Document) -> None:
        """Prepare the deletion of a response: cancel its run, and delete its events."""
        if not _is_background(document):
            return
        if state_of(document) in UNFINISHED:
            await self.cancel(tenant, responses, name, document)
        settings = self._policies.current.responses_of(tenant).background
        try:
            await self._events(tenant.name, settings, name).delete()
        except StorageUnavailable as error:
            raise StorageUnavailable(error.message, headers={"retry-after": "1"}) from error

    async def stream(
        self, policy: Policy, tenant: Tenant, name: str, document: Document, *, after: int
    ) -> AsyncIterator[bytes]:
        """Return the events of a response with numbers above `after`, as they come. Raises `BadRequest`."""
        if not _is_background(document):
            raise BadRequest(
                "stream: only a response that was created with `background: true` can be streamed again; omit it",
                param="stream",
            )
        settings = policy.responses_of(tenant)
        first = await self._first_event(tenant.name, settings.background, name)
        if first is None or after + 1 < first:
            missing = "the events of this response" if first is None else f"its events before number {first}"
            raise BadRequest(
                f"starting_after: {missing} are no longer stored; get the response without stream",
                param="starting_after",
            )
        if self._followers.total() >= FOLLOWERS_MAX:
            raise Overloaded(f"{FOLLOWERS_MAX} streams are being followed", retry_after_seconds=RETRY_SECONDS)
        if self._followers[tenant.name] >= TENANT_FOLLOWERS_MAX:
            raise LimitReached(
                f"{TENANT_FOLLOWERS_MAX} streams of this tenant are being followed; try again when one has ended",
                retry_after_seconds=RETRY_SECONDS,
            )
        return self._follow(tenant.name, settings, name, after + 1)

    async def _first_event(self, tenant: str, settings: Background, name: str) -> int | None:
        """The number of a response's oldest event that is stored or will be. None if there is none."""
        run, events = self._runs.get(name), self._events(tenant, settings, name)
        if (first := await events.first()) is not None:
            return first
        if run is not None:
            return run.log.first
        if await RunLease(self._storage, tenant, name).is_held():
            return 0  # the gateway that runs it has written none yet
        return await events.first()  # it may have written them just before it ended

    async def _follow(self, tenant: str, settings: Responses, name: str, number: int) -> AsyncGenerator[bytes]:
        """Yield the events from `number` on, until the response has ended."""
        self._followers[tenant] += 1
        try:
            events = self._events(tenant, settings.background, name)
            follower = Follower(self._storage, self._runs, events, tenant, name, number)
            async for frames in follower.frames():
                yield frames
        finally:
            self._followers -= Counter((tenant,))  # without entries of 0


def _is_background(document: Document) -> bool:
    return bool(msgspec.json.decode(response_of(document)).get("background"))  # deployments with the API may omit it


def _marker(response_id: str) -> str:
    """Name of the document that asks the gateway which runs a response to cancel it."""
    return f"cancel {response_id}"
