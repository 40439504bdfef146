"""The events of a response in the background: numbered, kept in memory while it runs, and stored in parts.

`EventLog` belongs to the gateway that runs the response. It keeps the newest events in memory and writes all of them
to the storage, from which every gateway can read them (`StoredEvents`). The events of a tenant are in a space of their
own, so that they never displace its responses. The name of a part has the number of its first event.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from itertools import islice

import msgspec

from gateway.providers.sse import split_frames
from gateway.storage.base import Document, DocumentStore

RECENT_BYTES_MAX = 256 * 1024  # of written events that stay in memory
UNWRITTEN_BYTES_MAX = 4 * 2**20  # of events that the storage does not take; beyond it, the oldest are lost
PART_BYTES = 64 * 1024  # of a part that is written without waiting for more events

_encode = msgspec.msgpack.encode
_frames = msgspec.msgpack.Decoder(list[bytes]).decode


def events_space(tenant: str) -> str:
    """Name under which the storage has the events of a tenant's responses in the background."""
    return f"events/{tenant}"


def part_name(response_id: str, number: int) -> str:
    return f"{response_id}/{number:08d}"


class StoredEvents:
    """The stored events of one response. Methods raise `StorageUnavailable`."""

    def __init__(
        self, documents: DocumentStore, tenant: str, response_id: str, *, keep_seconds: float, max_bytes: int
    ) -> None:
        self._documents = documents
        self._space = events_space(tenant)
        self._id = response_id
        self._keep_seconds = keep_seconds
        self._max_bytes = max_bytes

    async def put(self, number: int, frames: list[bytes]) -> None:
        """Store events, of which the first has this number."""
        await self._documents.put_document(
            self._space,
            part_name(self._id, number),
            Document(_encode(frames), b""),
            ttl_seconds=self._keep_seconds,
            max_bytes=self._max_bytes,
        )

    async def since(self, number: int) -> tuple[int, list[bytes]] | None:
        """Return the first stored events from this number on, and the number of the first. None if there are none."""
        at_most = await self._list(part_name(self._id, number + 1), newest_first=True)
        later = await self._list(part_name(self._id, number), newest_first=False)
        for name in (*at_most, *later):
            (head,) = await self._documents.get_heads(self._space, [name])
            first, frames = int(name.rpartition("/")[2]), [] if head is None else _frames(head)
            if first + len(frames) > number:
                return max(first, number), frames[max(0, number - first) :]
        return None

    async def first(self) -> int | None:
        """Return the number of the oldest stored event. None if there are none."""
        names = await self._list(None, newest_first=False)
        return int(names[0].rpartition("/")[2]) if names else None

    async def delete(self) -> None:
        """Delete all events."""
        while names := await self._documents.list_documents(self._space, self._id, limit=100):
            for name in names:
                await self._documents.delete_document(self._space, name)

    async def _list(self, after: str | None, *, newest_first: bool) -> list[str]:
        return await self._documents.list_documents(
            self._space, self._id, after=after, limit=1, newest_first=newest_first
        )


class EventLog:
    """The events of a response that this gateway runs."""

    def __init__(self, stored: StoredEvents) -> None:
        self._stored = stored
        self._frames: deque[bytes] = deque()
        self._bytes = 0  # of the frames in memory
        self._first = 0  # number of the first event in memory
        self._written = 0  # number of the first event that is not stored
        self._unwritten_bytes = 0
        self._changed = asyncio.Event()
        self.ended = False

    @property
    def first(self) -> int:
        """The number of the first event in memory."""
        return self._first

    @property
    def next(self) -> int:
        """The number of the next event."""
        return self._first + len(self._frames)

    @property
    def has_full_part(self) -> bool:
        """Whether there are so many events that they should be written now."""
        return self._unwritten_bytes >= PART_BYTES

    def add(self, frames: bytes) -> None:
        """Add events. Comments, which keep connections open, are no events."""
        for frame in split_frames(frames):
            if not frame.startswith(b":"):
                self._frames.append(frame)
                self._bytes += len(frame)
                self._unwritten_bytes += len(frame)
        while self._unwritten_bytes > UNWRITTEN_BYTES_MAX:
            if self._first == self._written:
                self._unwritten_bytes -= len(self._frames[0])
                self._written += 1
            self._drop_first()
        self._trim()
        self._tell()

    def end(self) -> None:
        """There will be no more events."""
        self.ended = True
        self._tell()

    def since(self, number: int) -> list[bytes]:
        """Return the events in memory from this number on, which must be at least `first`."""
        return list(islice(self._frames, max(0, number - self._first), None))

    async def changed(self) -> None:
        """Wait until there are more events, or until the end."""
        await self._changed.wait()

    async def write(self) -> None:
        """Store the events that are not stored. Raises `StorageUnavailable`; they are then written the next time."""
        frames = self.since(self._written)
        if not frames:
            return
        first, size = self._written, sum(map(len, frames))
        await self._stored.put(first, frames)
        if self._written == first:  # unless events were lost meanwhile
            self._written += len(frames)
            self._unwritten_bytes -= size
        self._trim()

    def _trim(self) -> None:
        while self._bytes > RECENT_BYTES_MAX and self._first < self._written:
            self._drop_first()

    def _drop_first(self) -> None:
        self._bytes -= len(self._frames.popleft())
        self._first += 1

    def _tell(self) -> None:
        before, self._changed = self._changed, asyncio.Event()
        before.set()


async def wait_at_most(log: EventLog, seconds: float) -> None:
    """Wait until the log changes, at most for some seconds."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await log.changed()
