"""Phase 3: the exact response cache, its key, and single flight: equal calls in flight share one upstream request.

The key is a digest of the cache scope (tenant or key), the model, and the canonical request without the fields that
cannot change an answer. The cache stores the bytes that the deployment sent, so a stream is replayed frame by frame.

Single flight: the first of several equal calls is the leader. It is sent upstream and records its answer, and the
others follow the recording as it grows. If a leader fails before its first chunk, its followers are sent themselves.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncGenerator, Callable
from typing import Literal, NamedTuple, Protocol

import msgspec

from gateway.core.errors import GatewayError, StorageUnavailable
from gateway.core.worker_thread import in_thread
from gateway.policy import Policy
from gateway.storage.base import BlobCache
from gateway.types import Call

# Fields that do not change an answer. The key covers all other fields, known or not.
IRRELEVANT_FIELDS = frozenset(
    {"cache_control", "metadata", "model", "prompt_cache_key", "safety_identifier", "service_tier", "store", "stream",
     "stream_options", "user"}
)  # fmt: skip
ALWAYS_ASKED = "include_usage"  # the gateway always asks the deployment for it, so it is not part of the key

_encode = msgspec.msgpack.encode
_options = msgspec.json.Decoder(dict[str, msgspec.Raw] | None)
_chunks = msgspec.msgpack.Decoder(list[bytes])
_MARK = b"\0api "  # begins the first of stored chunks that have another API format; no answer contains a zero byte


def _marker(api: str) -> bytes:
    return _MARK + api.encode()


class LeaderFailed(Exception):
    """The leader failed before its first chunk, so the follower must be sent itself."""


class RecordingKeeper(Protocol):
    """The owner of a recording: the response cache, or the first request with an idempotency key."""

    def forget(self, flight: Flight, recording: Recording) -> None:
        """New equal calls no longer follow this recording."""

    async def keep(self, key: str, chunks: list[bytes], ttl_seconds: float) -> None:
        """Store a complete answer. Raises nothing if the storage is unreachable."""


class Recording:
    """An answer as its leader receives it: one writer, any number of followers.

    The leader must end it with `finish` or `fail` on every way out, because its followers wait for that.
    """

    def __init__(self, cache: RecordingKeeper, flight: Flight, ttl_seconds: float, max_bytes: int) -> None:
        self._cache = cache
        self._flight = flight
        self._ttl_seconds = ttl_seconds
        self._max_bytes = max_bytes
        self._bytes = 0
        self._grown = asyncio.Event()
        self.chunks: list[bytes] = []
        self.api: str | None = None  # API format of the chunks, if it is not OpenAI's
        self.followers = 0
        self.ended = False
        self.error: GatewayError | None = None
        self._on_abandoned: Callable[[], None] = lambda: None

    def __enter__(self) -> Recording:
        return self

    def __exit__(self, *_: object) -> None:
        self.fail(None)

    def when_abandoned(self, tell: Callable[[], None]) -> None:
        """Call `tell` when the last follower disconnects before the end."""
        self._on_abandoned = tell

    @property
    def followed(self) -> bool:
        return self.followers > 0

    def answered_in(self, api: str) -> None:
        """Set the API format of the chunks. Call it before the first one."""
        self.api = api

    def write(self, chunk: bytes) -> None:
        """Record a chunk. Above the size limit the answer is neither stored nor offered to new followers."""
        self._bytes += len(chunk)
        if self._bytes > self._max_bytes:
            self._cache.forget(self._flight, self)
            if not self.followed:
                self.chunks.clear()
                return
        self.chunks.append(chunk)
        self._wake()

    async def finish(self, *, keep: bool = True) -> None:
        """The answer is complete: store it if `keep`. If the storage is unreachable, it is not stored."""
        self.ended = True
        self._wake()
        self._cache.forget(self._flight, self)
        if keep and self._bytes <= self._max_bytes:
            marked = self.chunks if self.api is None else [_marker(self.api), *self.chunks]
            await self._cache.keep(self._flight.key, marked, self._ttl_seconds)

    def fail(self, error: GatewayError | None) -> None:
        """The answer will not be completed. Does nothing after `finish`."""
        if not self.ended:
            self.error = error
            self.ended = True
            self._wake()
            self._cache.forget(self._flight, self)

    def replay(self, chunks: list[bytes]) -> None:
        """The answer was stored already; followers get these chunks."""
        if chunks and chunks[0].startswith(_MARK):
            self.api = chunks[0].removeprefix(_MARK).decode()
            chunks = chunks[1:]
        self.chunks = chunks
        self.ended = True
        self._wake()
        self._cache.forget(self._flight, self)

    def _wake(self) -> None:
        self._grown.set()
        self._grown = asyncio.Event()

    async def follow(self) -> AsyncGenerator[bytes, None]:
        """All chunks, as they arrive. Raises `LeaderFailed` before the first, later the leader's own error.

        A cancelled leader has no error: its answer just ends early, and the reader notices that it is incomplete.
        """
        self.followers += 1
        try:
            position = 0
            while True:
                while position < len(self.chunks):
                    yield self.chunks[position]
                    position += 1
                if self.ended:
                    break
                await self._grown.wait()
            if position == 0 and (self.error or not self.chunks):
                raise LeaderFailed
            if self.error:
                raise self.error
        finally:
            self.followers -= 1
            if not (self.followers or self.ended):
                self._on_abandoned()


class Unrecorded:
    """Stands in for `Recording` if the answer is neither stored nor shared."""

    followed = False

    def answered_in(self, api: str) -> None: ...

    def __enter__(self) -> Unrecorded:
        return self

    def __exit__(self, *_: object) -> None: ...

    def when_abandoned(self, tell: Callable[[], None]) -> None: ...

    def write(self, chunk: bytes) -> None: ...

    async def finish(self, *, keep: bool = True) -> None: ...

    def fail(self, error: GatewayError | None) -> None: ...


class Answer:
    """An answer that needs no upstream request: stored earlier ("hit"), or of an equal call in flight ("shared").

    The reader closes it, so that the leader knows at once when its last follower is gone.
    """

    content_type = "application/json"  # of an answer that does not stream

    def __init__(self, kind: Literal["hit", "shared"], recording: Recording) -> None:
        self.kind = kind
        self._recording = recording
        self._chunks = recording.follow()

    @property
    def api(self) -> str | None:
        """The client's API format, if the chunks have it. Known once the first chunk has arrived."""
        return self._recording.api

    async def first(self) -> bytes:
        """The first chunk. Raises `LeaderFailed` if there is none."""
        return await anext(self._chunks)

    async def stream_to(self, sink: Callable[[bytes], bool], _: object = None) -> bool:
        """Pass the chunks after the first to `sink`. True at the end, False if `sink` returned False."""
        async for chunk in self._chunks:
            if not sink(chunk):
                return False
        return True

    async def __aenter__(self) -> Answer:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._chunks.aclose()


class Flight(NamedTuple):
    """The key of single flight. It has the latency class, so no call waits longer than its class allows."""

    key: str
    class_name: str


UNRECORDED = Unrecorded()


class ResponseCache:
    """The exact response cache over shared storage. One per gateway."""

    def __init__(self, blobs: BlobCache) -> None:
        self._blobs = blobs
        self._flights: dict[Flight, Recording] = {}  # bounded by the calls in flight
        self._policy: Policy | None = None  # of the last call
        self._caches_all = False  # whether that policy caches calls whose answers may differ

    @property
    def in_flight(self) -> int:
        """Answers that are being recorded now."""
        return len(self._flights)

    async def lookup(self, call: Call) -> Answer | Recording | Unrecorded:
        """An `Answer` to replay or follow, or the recording that the caller must fill and end."""
        if call.policy is not self._policy:
            self._policy, self._caches_all = call.policy, call.policy.cache.when == "always"
        if not (call.deterministic or self._caches_all):  # the usual case, without a closer look
            return UNRECORDED
        key = await in_thread(cache_key, call) if call.large else cache_key(call)
        if key is None:
            return UNRECORDED
        flight = Flight(key, call.class_name)
        if leader := self._flights.get(flight):
            return Answer("shared", leader)
        # Registered before the storage is read, so that equal calls arriving meanwhile follow this one.
        settings = call.policy.cache
        recording = self._flights[flight] = Recording(self, flight, settings.ttl, settings.max_answer_bytes)
        try:
            kept = await self._kept(key)
        except BaseException:
            recording.fail(None)
            raise
        if kept is None:
            return recording
        recording.replay(kept)
        return Answer("hit", recording)

    async def _kept(self, key: str) -> list[bytes] | None:
        """The stored answer. None also if the storage is unreachable or returns something that cannot be decoded."""
        try:
            kept = await self._blobs.get(key)
            return None if kept is None else _chunks.decode(kept)
        except (StorageUnavailable, msgspec.MsgspecError):
            return None

    async def keep(self, key: str, chunks: list[bytes], ttl_seconds: float) -> None:
        """Store an answer. If the storage is unreachable, it is not stored."""
        try:
            await self._blobs.put(key, _encode(chunks), ttl_seconds=ttl_seconds)
        except StorageUnavailable:
            return

    def forget(self, flight: Flight, recording: Recording) -> None:
        """New equal calls no longer follow this recording."""
        if self._flights.get(flight) is recording:
            del self._flights[flight]


def cache_key(call: Call) -> str | None:
    """Equal for calls that may share one answer; None for a call that is not cached."""
    settings = call.policy.cache
    if settings.scope == "off" or call.passed is not None or not (call.deterministic or settings.when == "always"):
        return None
    principal = call.principal
    digest = hashlib.sha256()
    owner = [principal.tenant_name, principal.key_id if settings.scope == "key" else None]
    served = [
        call.policy.deployments_by_name[name].model_for(call.wildcard) for name in call.model.deployments
    ]  # a policy reload may change it
    digest.update(_encode([owner, call.model_name, served, call.operation.value, call.stream]))
    for name in sorted(call.fields.keys() - IRRELEVANT_FIELDS):
        digest.update(_encode([name, bytes(call.fields[name])]))
    if (native := call.native) is not None:  # some deployments get this instead of the fields
        digest.update(_encode([native.api, native.headers]))
        for name in sorted(native.fields.keys() - IRRELEVANT_FIELDS):
            digest.update(_encode([name, bytes(native.fields[name])]))
    options = (_options.decode(call.fields["stream_options"]) or {}) if "stream_options" in call.fields else {}
    for name in sorted(options.keys() - {ALWAYS_ASKED}):
        digest.update(_encode(["stream_options", name, bytes(options[name])]))
    return f"cache:{digest.hexdigest()}"
