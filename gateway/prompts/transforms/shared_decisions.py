"""Decisions that one gateway makes first and its replicas follow: a bounded map in memory, in front of the storage.

Reading never waits. A key that this process has not seen raises `DecisionNotLoaded`, and `load` reads it from the
storage once. New decisions are written to the storage in the background. Without a storage, this is only a map in this
process's memory.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from itertools import zip_longest

from gateway.core.errors import StorageUnavailable
from gateway.storage.base import BlobCache

MAX_BYTES = 16 * 2**20
ENTRY_BYTES = 200  # memory of an entry besides its key and value, about
KEEP_SECONDS = 30 * 86400.0
CONFIRM_SECONDS = 1.0  # two replicas may decide in the same moment; after so long, the storage's value applies
MAX_LOADED = 64  # keys of one `load`
MAX_TASKS = 256  # background writes; further decisions are not shared


class DecisionNotLoaded(Exception):
    """This process does not know whether the storage has these keys. `load` them, then retry."""

    def __init__(self, keys: Sequence[str]) -> None:
        super().__init__(*keys)
        self.keys = tuple(keys)


class SharedDecisions:
    """The decisions, by key. Owned by the event loop."""

    def __init__(self, blobs: BlobCache | None = None, *, max_bytes: int = MAX_BYTES) -> None:
        self._blobs = blobs
        self._max_bytes = max_bytes
        self._bytes = 0
        self._entries: OrderedDict[str, bytes | None] = OrderedDict()  # None: not in the storage
        self._tasks: set[asyncio.Task[None]] = set()
        self._storage_ignored = False
        self.generation = 0  # counts own decisions that another replica's replaced

    def find(self, key: str) -> bytes | None:
        """The decision for a key; None if there is none. Raises `DecisionNotLoaded`."""
        if key not in self._entries:
            if self._blobs is None or self._storage_ignored:
                return None
            raise DecisionNotLoaded([key])
        self._entries.move_to_end(key)
        return self._entries[key]

    @contextlib.contextmanager
    def without_storage(self) -> Iterator[None]:
        """Context manager: keys that are not in memory count as undecided. Do not await within it."""
        self._storage_ignored = True
        try:
            yield
        finally:
            self._storage_ignored = False

    async def load(self, keys: Sequence[str]) -> None:
        """Read keys from the storage, together and within its own time limit. Afterwards `find` knows all of them.

        That holds even if the storage is unavailable. Keys beyond `MAX_LOADED` are not read: this process decides them.
        """
        wanted = list(dict.fromkeys(keys))
        values = await asyncio.gather(*map(self._read, wanted[:MAX_LOADED]))
        for key, value in zip_longest(wanted, values):
            if self._entries.get(key) is None:  # otherwise it was decided meanwhile
                self._set(key, value)

    def decide(self, key: str, value: bytes, *, first_wins: bool = True) -> None:
        """Decide, and share the decision.

        If several replicas decide, the first one wins, or the last if not `first_wins`.
        """
        self._set(key, value)
        if self._blobs is None or len(self._tasks) >= MAX_TASKS:
            return
        task = asyncio.get_running_loop().create_task(self._publish(self._blobs, key, value, first_wins))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Cancel the background writes. What is not in the storage yet stays unshared. Safe to call twice."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    async def _publish(self, blobs: BlobCache, key: str, value: bytes, first_wins: bool) -> None:
        with contextlib.suppress(StorageUnavailable):  # then the decision applies to this replica only
            published = await blobs.get(key) if first_wins else None
            if published is None:
                await blobs.put(key, value, ttl_seconds=KEEP_SECONDS)
                if not first_wins:
                    return
                await asyncio.sleep(CONFIRM_SECONDS)
                published = await blobs.get(key)
            self._adopt(key, published)

    def _adopt(self, key: str, value: bytes | None) -> None:
        if value is not None and value != self._entries.get(key):
            self._set(key, value)
            self.generation += 1

    async def _read(self, key: str) -> bytes | None:
        if self._blobs is None:
            return None
        with contextlib.suppress(StorageUnavailable):
            return await self._blobs.get(key)
        return None

    def _set(self, key: str, value: bytes | None) -> None:
        if key in self._entries:
            self._bytes -= _size(key, self._entries[key])
        self._entries[key] = value
        self._entries.move_to_end(key)
        self._bytes += _size(key, value)
        while self._bytes > self._max_bytes and len(self._entries) > 1:
            self._bytes -= _size(*self._entries.popitem(last=False))


def _size(key: str, value: bytes | None) -> int:
    return ENTRY_BYTES + len(key) + len(value or b"")
