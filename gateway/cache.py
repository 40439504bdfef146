"""Phase 3: the exact response cache, and one upstream call for equal calls in flight.

The key is a digest of whoever may share the answer, the model and the canonical request, all of it but what can not
change the answer. What is kept is what the upstream sent, so that a stream is replayed as a stream, frame by frame.

The first of several equal calls leads: it asks the upstream and records; the others follow its recording as it grows.
A leader that fails before its first chunk leaves its followers to ask for themselves.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable
from typing import Literal

import msgspec

from gateway.errors import GatewayError, StorageUnavailable
from gateway.storage.base import Blobs
from gateway.types import Call

# What an answer does not depend on. The key holds everything else, known or not.
IRRELEVANT_FIELDS = frozenset(
    {"metadata", "model", "prompt_cache_key", "safety_identifier", "service_tier", "store", "stream", "stream_options",
     "user"}
)  # fmt: skip

_encode = msgspec.msgpack.encode
_chunks = msgspec.msgpack.Decoder(list[bytes])


class LeaderFailed(Exception):
    """The call that was followed came to nothing before its first chunk."""


class Recording:
    """An answer as its leader receives it. One writer, any number of followers; ends by `finish` or `fail`."""

    def __init__(self, cache: ResponseCache, key: str, ttl_seconds: float, max_bytes: int) -> None:
        self._cache = cache
        self._key = key
        self._ttl_seconds = ttl_seconds
        self._max_bytes = max_bytes
        self._bytes = 0
        self._grown = asyncio.Event()
        self.chunks: list[bytes] = []
        self.followers = 0
        self.ended = False
        self.error: GatewayError | None = None
        self.on_abandoned: Callable[[], None] = lambda: None  # told when the last follower has left

    @property
    def followed(self) -> bool:
        return self.followers > 0

    def write(self, chunk: bytes) -> None:
        """Keep a chunk. Beyond the size limit the answer is not kept, and finds no new followers."""
        self._bytes += len(chunk)
        if self._bytes > self._max_bytes:
            self._cache.forget(self._key, self)
            if not self.followed:
                self.chunks.clear()
                return
        self.chunks.append(chunk)
        self._wake()

    async def finish(self) -> None:
        """The answer is whole: keep it for later calls. A store that is away costs the cache entry, nothing else."""
        self.ended = True
        self._wake()
        self._cache.forget(self._key, self)
        if self._bytes <= self._max_bytes:
            await self._cache.keep(self._key, self.chunks, self._ttl_seconds)

    def fail(self, error: GatewayError | None) -> None:
        """The answer will not be whole. Does nothing after `finish`."""
        if not self.ended:
            self.error = error
            self.ended = True
            self._wake()
            self._cache.forget(self._key, self)

    def _wake(self) -> None:
        self._grown.set()
        self._grown = asyncio.Event()

    async def follow(self) -> AsyncIterator[bytes]:
        """All chunks from the first on, as they come. Raises `LeaderFailed` before the first, else the error."""
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
                self.on_abandoned()


class Unrecorded:
    """What a call leads that is neither kept nor shared."""

    followed = False
    on_abandoned: Callable[[], None]

    def write(self, chunk: bytes) -> None: ...

    async def finish(self) -> None: ...

    def fail(self, error: GatewayError | None) -> None: ...


class Answer:
    """An answer that needs no upstream: kept from earlier ("hit"), or being given to an equal call ("shared")."""

    def __init__(self, kind: Literal["hit", "shared"], chunks: AsyncIterator[bytes]) -> None:
        self.kind = kind
        self._chunks = chunks

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self._chunks


UNRECORDED = Unrecorded()


class ResponseCache:
    """`lookup` gives an `Answer`, or what the caller is to record its own answer with."""

    def __init__(self, blobs: Blobs) -> None:
        self._blobs = blobs
        self._flights: dict[str, Recording] = {}  # bounded by the calls in flight

    async def lookup(self, call: Call) -> Answer | Recording | Unrecorded:
        key = cache_key(call)
        if key is None:
            return UNRECORDED
        if flight := self._flights.get(key):
            return Answer("shared", flight.follow())
        # Registered before the store is asked: equal calls that come meanwhile follow this one.
        settings = call.policy.cache
        recording = self._flights[key] = Recording(self, key, settings.ttl, settings.max_answer_bytes)
        try:
            kept = await self._blobs.get(key)
        except StorageUnavailable:
            return recording
        except BaseException:
            recording.fail(None)
            raise
        if kept is None:
            return recording
        recording.chunks = _chunks.decode(kept)
        recording.ended = True
        recording._wake()
        self.forget(key, recording)
        return Answer("hit", recording.follow())

    async def keep(self, key: str, chunks: list[bytes], ttl_seconds: float) -> None:
        try:
            await self._blobs.put(key, _encode(chunks), ttl_seconds=ttl_seconds)
        except StorageUnavailable:
            return

    def forget(self, key: str, recording: Recording) -> None:
        if self._flights.get(key) is recording:
            del self._flights[key]


def cache_key(call: Call) -> str | None:
    """Equal for calls that may share one answer; None for a call that is not cached."""
    settings = call.policy.cache
    if settings.scope == "off" or not (call.deterministic or settings.when == "always"):
        return None
    principal = call.principal
    digest = hashlib.sha256()
    owner = [principal.tenant.name, principal.key_id if settings.scope == "key" else None]
    digest.update(_encode([owner, call.model.name, call.operation.value, call.stream]))
    for name in sorted(call.fields.keys() - IRRELEVANT_FIELDS):
        digest.update(_encode([name, bytes(call.fields[name])]))
    return f"cache:{digest.hexdigest()}"
