"""Phase 3: the exact response cache, and one upstream call for equal calls in flight.

The key is a digest of whoever may share the answer, the model and the canonical request, all of it but what can not
change the answer. What is kept is what the upstream sent, so that a stream is replayed as a stream, frame by frame.

The first of several equal calls leads: it asks the upstream and records; the others follow its recording as it grows.
A leader that fails before its first chunk leaves its followers to ask for themselves.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncGenerator, Callable
from typing import Literal, NamedTuple

import msgspec

from gateway.core.errors import GatewayError, StorageUnavailable
from gateway.storage.base import BlobCache
from gateway.types import Call

# What an answer does not depend on. The key holds everything else, known or not.
IRRELEVANT_FIELDS = frozenset(
    {"cache_control", "metadata", "model", "prompt_cache_key", "safety_identifier", "service_tier", "store", "stream",
     "stream_options", "user"}
)  # fmt: skip
ALWAYS_ASKED = "include_usage"  # of the upstream, whatever the client asked for

_encode = msgspec.msgpack.encode
_options = msgspec.json.Decoder(dict[str, msgspec.Raw] | None)
_chunks = msgspec.msgpack.Decoder(list[bytes])


class LeaderFailed(Exception):
    """The call that was followed came to nothing before its first chunk."""


class Recording:
    """An answer as its leader receives it. One writer, any number of followers; ends by `finish` or `fail`.

    Whoever got it from `lookup` must end it on every way out: its followers wait for nothing else.
    """

    def __init__(self, cache: ResponseCache, flight: Flight, ttl_seconds: float, max_bytes: int) -> None:
        self._cache = cache
        self._flight = flight
        self._ttl_seconds = ttl_seconds
        self._max_bytes = max_bytes
        self._bytes = 0
        self._grown = asyncio.Event()
        self.chunks: list[bytes] = []
        self.followers = 0
        self.ended = False
        self.error: GatewayError | None = None
        self._on_abandoned: Callable[[], None] = lambda: None

    def __enter__(self) -> Recording:
        return self

    def __exit__(self, *_: object) -> None:
        """On every way out: whoever follows waits for nothing else."""
        self.fail(None)

    def when_abandoned(self, tell: Callable[[], None]) -> None:
        """`tell` is called when the last follower leaves before the end."""
        self._on_abandoned = tell

    @property
    def followed(self) -> bool:
        return self.followers > 0

    def write(self, chunk: bytes) -> None:
        """Keep a chunk. Beyond the size limit the answer is not kept, and finds no new followers."""
        self._bytes += len(chunk)
        if self._bytes > self._max_bytes:
            self._cache.forget(self._flight, self)
            if not self.followed:
                self.chunks.clear()
                return
        self.chunks.append(chunk)
        self._wake()

    async def finish(self, *, keep: bool = True) -> None:
        """The answer is whole: keep it for later calls. A store that is away costs the cache entry, nothing else."""
        self.ended = True
        self._wake()
        self._cache.forget(self._flight, self)
        if keep and self._bytes <= self._max_bytes:
            await self._cache.keep(self._flight.key, self.chunks, self._ttl_seconds)

    def fail(self, error: GatewayError | None) -> None:
        """The answer will not be whole. Does nothing after `finish`."""
        if not self.ended:
            self.error = error
            self.ended = True
            self._wake()
            self._cache.forget(self._flight, self)

    def replay(self, chunks: list[bytes]) -> None:
        """The answer was there already: it is given to whoever follows."""
        self.chunks = chunks
        self.ended = True
        self._wake()
        self._cache.forget(self._flight, self)

    def _wake(self) -> None:
        self._grown.set()
        self._grown = asyncio.Event()

    async def follow(self) -> AsyncGenerator[bytes, None]:
        """All chunks from the first on, as they come. Raises `LeaderFailed` before the first, else the error.

        One without an error was cancelled: its answer then ends before its end, which its reader notices.
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
    """What a call leads that is neither kept nor shared."""

    followed = False

    def __enter__(self) -> Unrecorded:
        return self

    def __exit__(self, *_: object) -> None: ...

    def when_abandoned(self, tell: Callable[[], None]) -> None: ...

    def write(self, chunk: bytes) -> None: ...

    async def finish(self, *, keep: bool = True) -> None: ...

    def fail(self, error: GatewayError | None) -> None: ...


class Answer:
    """An answer that needs no upstream: kept from earlier ("hit"), or being given to an equal call ("shared").

    Closed by its reader, so that a leader knows at once when nobody follows any more.
    """

    def __init__(self, kind: Literal["hit", "shared"], chunks: AsyncGenerator[bytes, None]) -> None:
        self.kind = kind
        self._chunks = chunks

    async def first(self) -> bytes:
        """Raises `LeaderFailed` where there is none."""
        return await anext(self._chunks)

    async def stream_to(self, sink: Callable[[bytes], bool]) -> bool:
        """Give `sink` the chunks behind the first. True at the end, False when it wants no more for now."""
        async for chunk in self._chunks:
            if not sink(chunk):
                return False
        return True

    async def __aenter__(self) -> Answer:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._chunks.aclose()


class Flight(NamedTuple):
    """Equal calls share an upstream call within their latency class only: none waits longer than its class may."""

    key: str
    class_name: str


UNRECORDED = Unrecorded()


class ResponseCache:
    """`lookup` gives an `Answer`, or what the caller is to record its own answer with."""

    def __init__(self, blobs: BlobCache) -> None:
        self._blobs = blobs
        self._flights: dict[Flight, Recording] = {}  # bounded by the calls in flight

    @property
    def in_flight(self) -> int:
        """How many answers are being recorded."""
        return len(self._flights)

    async def lookup(self, call: Call) -> Answer | Recording | Unrecorded:
        key = cache_key(call)
        if key is None:
            return UNRECORDED
        flight = Flight(key, call.class_name)
        if leader := self._flights.get(flight):
            return Answer("shared", leader.follow())
        # Registered before the store is asked: equal calls that come meanwhile follow this one.
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
        return Answer("hit", recording.follow())

    async def _kept(self, key: str) -> list[bytes] | None:
        """None also where the store is away, or gives back what was never put into it."""
        try:
            kept = await self._blobs.get(key)
            return None if kept is None else _chunks.decode(kept)
        except (StorageUnavailable, msgspec.MsgspecError):
            return None

    async def keep(self, key: str, chunks: list[bytes], ttl_seconds: float) -> None:
        try:
            await self._blobs.put(key, _encode(chunks), ttl_seconds=ttl_seconds)
        except StorageUnavailable:
            return

    def forget(self, flight: Flight, recording: Recording) -> None:
        if self._flights.get(flight) is recording:
            del self._flights[flight]


def cache_key(call: Call) -> str | None:
    """Equal for calls that may share one answer; None for a call that is not cached."""
    settings = call.policy.cache
    if settings.scope == "off" or not (call.deterministic or settings.when == "always"):
        return None
    principal = call.principal
    digest = hashlib.sha256()
    owner = [principal.tenant.name, principal.key_id if settings.scope == "key" else None]
    served = [call.policy.deployments_by_name[name].model for name in call.model.deployments]  # a reload may change it
    digest.update(_encode([owner, call.model.name, served, call.operation.value, call.stream]))
    for name in sorted(call.fields.keys() - IRRELEVANT_FIELDS):
        digest.update(_encode([name, bytes(call.fields[name])]))
    options = (_options.decode(call.fields["stream_options"]) or {}) if "stream_options" in call.fields else {}
    for name in sorted(options.keys() - {ALWAYS_ASKED}):
        digest.update(_encode(["stream_options", name, bytes(options[name])]))
    return f"cache:{digest.hexdigest()}"
