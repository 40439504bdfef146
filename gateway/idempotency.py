"""Idempotency keys: a request that repeats an `Idempotency-Key` gets the answer of the first one, and runs only once.

`Idempotency.once` wraps the handler of an endpoint. A request without the header passes through. A request with it is
identified by its tenant, its key and a digest of its path and body, and there are four cases:

* Nothing is known of the key: the request runs, and the reply is recorded as the client receives it.
* An answer is stored: it is replayed, stream or not, and is not billed again.
* The same request is in flight: this one joins it, or is rejected, as the policy says. In one process a joined request
  follows the reply as it grows; with another process it waits for the stored answer.
* The key belongs to another body: the request is rejected.

Only one process may run a keyed request. It holds a slot of the storage's reservations, whose limit is one and whose
lease it extends while the request runs. If it dies, the lease ends, and the next request with this key runs. The
document of a key is written when the request begins, so that another body is rejected from then on, and is replaced by
the answer. A failed request deletes it, because a retry must run again.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import time
from collections.abc import AsyncIterator, Coroutine, Mapping
from typing import Any, TypeVar
from urllib.parse import quote

import msgspec

from gateway.core.errors import (
    BadRequest,
    GatewayError,
    IdempotencyKeyInFlight,
    IdempotencyKeyReused,
    StorageUnavailable,
    UpstreamCut,
    retry_after,
)
from gateway.core.ids import random_bytes
from gateway.core.worker_thread import LARGE_BYTES, in_thread
from gateway.endpoints.exchange import Exchange
from gateway.policy import IdempotencyKeys
from gateway.prompts.reader import BodyReader
from gateway.response_cache import Answer, Flight, LeaderFailed, Recording
from gateway.serve import Components, RequestHandler
from gateway.storage.base import Document, Grant, SlotCharge, Storage
from gateway.telemetry import CallRecord
from gateway.types import Outcome, Principal

HEADER = b"idempotency-key"
RETRY_HEADER = b"x-stainless-retry-count"  # of SDKs that count their retries; the first attempt has 0
KEY_CHARACTERS_MAX = 255
LEASE_SECONDS = 15.0  # after the death of a gateway, its keyed requests can run again after at most this time
EXTEND_SECONDS = LEASE_SECONDS / 3
POLL_SECONDS = 0.05  # first pause between two checks of another process; doubles up to the next
POLL_SECONDS_MAX = 1.0
JOIN_SECONDS_MAX = 600.0  # longest wait for another process
IN_FLIGHT_RETRY_SECONDS = 1.0

Result = TypeVar("Result")

_encode = msgspec.msgpack.encode


class _Stored(msgspec.Struct, array_like=True):
    """Head of a key's document. Without an answer, a request with this fingerprint runs or its gateway has died."""

    fingerprint: bytes
    answered: bool


class ReplyHead(msgspec.Struct, array_like=True):
    """Status and headers of a recorded reply: the first chunk of its recording."""

    status: int
    content_type: str
    headers: dict[str, str]
    length: int | None  # bytes of the body; None for a stream
    request_id: str


_decode_stored = msgspec.msgpack.Decoder(_Stored).decode
_decode_chunks = msgspec.msgpack.Decoder(list[bytes]).decode
_decode_head = msgspec.msgpack.Decoder(ReplyHead).decode


class _StorageAway(Exception):
    """The storage does not answer, so it is unknown whether the request runs already."""


class KeyedRequest(msgspec.Struct, frozen=True):
    """One request with an idempotency key."""

    tenant: str
    name: str  # of its document and its slot: a digest of owner and idempotency key
    fingerprint: bytes
    settings: IdempotencyKeys
    keep_seconds: float
    joins: bool  # whether it joins an equal request in flight

    @property
    def space(self) -> str:
        return answers_space(self.tenant)


class _Leader:
    """The request in this process that has an idempotency key first. Others with the same key follow its recording."""

    def __init__(self, flights: dict[Flight, _Leader], storage: Storage, request: KeyedRequest) -> None:
        self.request = request
        self.complete = False
        self.stored = False
        self._flights = flights
        self._storage = storage
        self._flight = Flight(request.name, "")
        self.recording = Recording(self, self._flight, request.keep_seconds, request.settings.max_answer_bytes)
        flights[self._flight] = self

    def forget(self, flight: Flight, recording: Recording) -> None:
        if self._flights.get(flight) is self:
            del self._flights[flight]

    async def keep(self, key: str, chunks: list[bytes], ttl_seconds: float) -> None:
        """Store the answer. If that fails, a retry runs again."""
        request = self.request
        document = Document(_encode(_Stored(request.fingerprint, answered=True)), _encode(chunks))
        with contextlib.suppress(StorageUnavailable):
            self.stored = await self._storage.put_document(
                request.space, key, document, ttl_seconds=ttl_seconds, max_bytes=request.settings.max_stored_bytes
            )


class ReplyRecorder:
    """Records what an exchange sends to its client."""

    def __init__(self, recording: Recording, request_id: str) -> None:
        self.write = recording.write
        self._request_id = request_id

    def begin(self, status: int, content_type: str, headers: Mapping[str, str], length: int | None) -> None:
        self.write(_encode(ReplyHead(status, content_type, dict(headers), length, self._request_id)))


class Idempotency:
    """Runs requests with an idempotency key at most once at a time, and replays their answers. One per process."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._flights: dict[Flight, _Leader] = {}  # bounded by the requests in flight
        self.outcomes = dict.fromkeys(
            ("stored", "not_stored", "failed", "replayed", "joined", "rejected", "storage_away"), 0
        )

    def once(self, story: RequestHandler) -> RequestHandler:
        """Wrap a handler. Requests without an idempotency key pay one dictionary look-up."""

        def handler(
            components: Components, reader: BodyReader, exchange: Exchange, record: CallRecord, call_id: str
        ) -> Coroutine[Any, Any, None]:
            run = story(components, reader, exchange, record, call_id)
            if HEADER not in exchange.headers:
                return run
            keep_seconds = components.policies.current.idempotency.keep
            return run if keep_seconds == "off" else self._once(run, components, exchange, record, keep_seconds)

        return handler

    async def _once(
        self,
        run: Coroutine[Any, Any, None],
        components: Components,
        exchange: Exchange,
        record: CallRecord,
        keep_seconds: float,
    ) -> None:
        """Answer a keyed request. `run` runs it, and is closed if another request's answer is used."""
        try:
            policy = components.policies.current
            record.timings.enter("authenticate")
            exchange.check_announced_body()
            principal = record.principal = await components.authenticator.authenticate(exchange.headers, policy)
            record.timings.enter("cache.lookup")
            body = await exchange.body(again=True)
            parts = (exchange, principal, body, policy.idempotency, keep_seconds)
            large = len(body) > LARGE_BYTES
            request = await in_thread(_keyed_request, *parts) if large else _keyed_request(*parts)
            try:
                while not await self._answer(request, run, exchange, record):
                    pass  # the request that this one followed failed before its answer began
            except _StorageAway as away:
                self.outcomes["storage_away"] += 1
                if policy.storage_outage.limits == "refuse":
                    raise StorageUnavailable(str(away), headers=retry_after(IN_FLIGHT_RETRY_SECONDS)) from away
                await run
        finally:
            run.close()

    async def _answer(
        self, request: KeyedRequest, run: Coroutine[Any, Any, None], exchange: Exchange, record: CallRecord
    ) -> bool:
        """Answer the request, by running it or with another one's answer. False if that one failed: try again."""
        leader = self._flights.get(Flight(request.name, ""))
        if leader is not None:
            _check_body(request, leader.request.fingerprint)
            self._check_joins(request)
            return await self._follow(leader, "shared", exchange, record)
        leader = _Leader(self._flights, self._storage, request)
        with leader.recording:
            async with contextlib.AsyncExitStack() as holds:
                stored = await self._claim(request, holds)
                if stored is None:
                    await self._lead(leader, run, exchange, record)
                    return True
            leader.complete = True
            leader.recording.replay(stored)
            return await self._follow(leader, "hit", exchange, record)

    async def _lead(
        self, leader: _Leader, run: Coroutine[Any, Any, None], exchange: Exchange, record: CallRecord
    ) -> None:
        """Run the request and record its reply. A failure is not stored: a retry runs again."""
        recording = leader.recording
        exchange.recorder = ReplyRecorder(recording, record.call_id)
        finishes = leader.request.settings.finish
        exchange.stay_while(lambda: finishes or recording.followed)
        recording.when_abandoned(exchange.leave_if_gone)
        try:
            await run
        except BaseException as error:
            exchange.recorder = None  # the error reply is not part of the answer
            recording.fail(error if isinstance(error, GatewayError) else None)
            self.outcomes["failed"] += 1
            raise
        else:
            leader.complete = True
            await recording.finish()
            self.outcomes["stored" if leader.stored else "not_stored"] += 1
        finally:
            if not leader.stored:
                with contextlib.suppress(StorageUnavailable):  # the key then stays bound to this body
                    await self._storage.delete_document(leader.request.space, leader.request.name)

    async def _follow(self, leader: _Leader, kind: str, exchange: Exchange, record: CallRecord) -> bool:
        """Send the reply of another request. Returns False if it failed before its reply began."""
        exchange.watch()
        record.cache = kind
        record.operation = None  # telemetry does not count it as a model call
        async with Answer("hit" if kind == "hit" else "shared", leader.recording) as answer:
            try:
                head = _decode_head(await answer.first())
            except LeaderFailed:
                exchange.unwatch()
                return False
            record.timings.enter("chat")
            self.outcomes["replayed" if kind == "hit" else "joined"] += 1
            await exchange.replay(head.status, head.content_type, _marked(head), length=head.length)
            ended = False
            while not ended:
                ended = await answer.stream_to(exchange.put)
                await exchange.drained()
        if not leader.complete:
            raise UpstreamCut("the answer ended before its end")
        await exchange.send(b"", last=True)
        record.outcome = Outcome.COMPLETE
        return True

    def _check_joins(self, request: KeyedRequest, waited_seconds: float = 0.0) -> None:
        if not request.joins or waited_seconds > JOIN_SECONDS_MAX:
            self.outcomes["rejected"] += 1
            raise IdempotencyKeyInFlight(
                "a request with this idempotency key is in flight; retry for its answer",
                retry_after_seconds=IN_FLIGHT_RETRY_SECONDS,
            )

    async def _claim(self, request: KeyedRequest, holds: contextlib.AsyncExitStack) -> list[bytes] | None:
        """Wait until this process may run the request, or until its answer is stored. Returns the stored answer.

        If it returns None, `holds` releases the right to run. Raises `IdempotencyKeyReused`, `IdempotencyKeyInFlight`
        or `_StorageAway`.
        """
        waited, pause = 0.0, POLL_SECONDS
        while True:
            async with contextlib.AsyncExitStack() as held:
                granted = await held.enter_async_context(self._slot(request))
                # Read after the slot was taken, so that it has what the slot's previous holder stored.
                document = await _asked(self._storage.get_document(request.space, request.name))
                if document is not None:
                    stored = _decode_stored(document.head)
                    _check_body(request, stored.fingerprint)
                    if stored.answered:
                        return _decode_chunks(document.body)
                if granted:
                    await _asked(self._bind(request))
                    holds.push_async_exit(held.pop_all())
                    return None
            self._check_joins(request, waited)
            await asyncio.sleep(pause)
            waited, pause = waited + pause, min(2 * pause, POLL_SECONDS_MAX)

    async def _bind(self, request: KeyedRequest) -> None:
        """Store that the key belongs to this body."""
        document = Document(_encode(_Stored(request.fingerprint, answered=False)), b"")
        await self._storage.put_document(
            request.space,
            request.name,
            document,
            ttl_seconds=request.keep_seconds,
            max_bytes=request.settings.max_stored_bytes,
        )

    @contextlib.asynccontextmanager
    async def _slot(self, request: KeyedRequest) -> AsyncIterator[bool]:
        """Take the key's only slot, and yield whether it was free. Its lease is extended until the end of the block."""
        slot = f"{quote(request.tenant, safe='')}/idempotency/{request.name}"
        reservation = f"{slot}/{random_bytes(8).hex()}"
        verdict = await _asked(
            self._storage.reserve(reservation, [SlotCharge(slot, 1)], lease_seconds=LEASE_SECONDS, now=time.time())
        )
        if not isinstance(verdict, Grant):
            yield False
            return
        extending = asyncio.create_task(self._extend(reservation))
        try:
            yield True
        finally:
            extending.cancel()
            with contextlib.suppress(StorageUnavailable):  # its lease ends by itself
                await self._storage.settle(reservation, [0], now=time.time())

    async def _extend(self, reservation: str) -> None:
        while True:
            await asyncio.sleep(EXTEND_SECONDS)
            with contextlib.suppress(StorageUnavailable):  # the lease lasts for two more tries
                await self._storage.extend_lease(reservation, lease_seconds=LEASE_SECONDS, now=time.time())


async def _asked(operation: Coroutine[Any, Any, Result]) -> Result:
    """Await a storage operation before the request runs. Raises `_StorageAway`, so that no failure of it is confused
    with a failure of the request."""
    try:
        return await operation
    except StorageUnavailable as error:
        raise _StorageAway(error.message) from error


def answers_space(tenant: str) -> str:
    """Name under which the storage has the answers of a tenant's idempotency keys, apart from its stored responses."""
    return f"idempotency/{tenant}"


def _keyed_request(
    exchange: Exchange, principal: Principal, body: bytes, settings: IdempotencyKeys, keep_seconds: float
) -> KeyedRequest:
    """Identify a request. Raises `BadRequest` if its idempotency key is unusable.

    The keys of a tenant share their idempotency keys, except for an API key that may not use everything that its tenant
    may use: it must not get an answer of a model that it may not ask.
    """
    key = exchange.headers[HEADER].decode("latin-1")
    if not (0 < len(key) <= KEY_CHARACTERS_MAX and key.isprintable()):
        raise BadRequest(
            f"Idempotency-Key: must have 1 to {KEY_CHARACTERS_MAX} printable characters", param="Idempotency-Key"
        )
    restricted = principal.models is not None or principal.classes is not None
    owner = principal.key_id if restricted else ""
    retries = exchange.headers.get(RETRY_HEADER, b"0")
    return KeyedRequest(
        tenant=principal.tenant_name,
        name=hashlib.sha256(_encode([owner, key])).hexdigest(),
        fingerprint=hashlib.sha256(_encode([exchange.path, body])).digest(),
        settings=settings,
        keep_seconds=keep_seconds,
        # The client has given up the attempt that a marked retry repeats, so there are no two callers to tell apart.
        joins=settings.in_flight == "join" or (retries.isdigit() and int(retries) > 0),
    )


def _check_body(request: KeyedRequest, fingerprint: bytes) -> None:
    if fingerprint != request.fingerprint:
        raise IdempotencyKeyReused(
            "this idempotency key was used for another request; use a new key for each request", param="Idempotency-Key"
        )


def _marked(head: ReplyHead) -> dict[str, str]:
    return {**head.headers, "idempotent-replayed": "true", "x-warmpath-replayed-request": head.request_id}
