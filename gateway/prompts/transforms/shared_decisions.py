"""What one gateway has decided first and its replicas then follow: a bounded map in memory, in front of the storage.

Reading it never waits. What this process has not seen is asked of the storage once, by `recall`; what is decided here
is written to the storage behind the caller's back. Without a storage it is this process's memory, and nothing more.
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
ENTRY_BYTES = 200  # what an entry costs beside its key and value, about
KEEP_SECONDS = 30 * 86400.0
CONFIRM_SECONDS = 1.0  # two replicas may decide at the same moment; this long after it, the storage's word counts
MAX_RECALLED = 64
MAX_TASKS = 256  # of those that write; what is decided beyond is not shared


class DecisionNotLoaded(Exception):
    """This process does not know whether the storage has these: `recall` them, then ask again."""

    def __init__(self, keys: Sequence[str]) -> None:
        super().__init__(*keys)
        self.keys = tuple(keys)


class SharedDecisions:
    def __init__(self, blobs: BlobCache | None = None, *, max_bytes: int = MAX_BYTES) -> None:
        self._blobs = blobs
        self._max_bytes = max_bytes
        self._bytes = 0
        self._entries: OrderedDict[str, bytes | None] = OrderedDict()  # None: the storage does not have it
        self._tasks: set[asyncio.Task[None]] = set()
        self._alone = False
        self.generation = 0  # counts what was replaced by another's decision

    def find(self, key: str) -> bytes | None:
        """What was decided, or None. Raises `NotInMemory`."""
        if key not in self._entries:
            if self._blobs is None or self._alone:
                return None
            raise DecisionNotLoaded([key])
        self._entries.move_to_end(key)
        return self._entries[key]

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Within this, what is not in memory is taken to be nowhere. Nothing may be awaited in it."""
        self._alone = True
        try:
            yield
        finally:
            self._alone = False

    async def recall(self, keys: Sequence[str]) -> None:
        """Ask the storage for all at once, within its own bound. `find` knows them afterwards, also where the storage
        is away. It is asked for no more than `MAX_RECALLED`; the others are decided here.
        """
        asked = list(dict.fromkeys(keys))
        values = await asyncio.gather(*map(self._stored, asked[:MAX_RECALLED]))
        for key, value in zip_longest(asked, values):
            if self._entries.get(key) is None:  # else it was decided meanwhile
                self._set(key, value)

    def keep(self, key: str, value: bytes, *, first_wins: bool = True) -> None:
        """Decide. In the storage the first of several replicas wins, or else the last."""
        self._set(key, value)
        if self._blobs is None or len(self._tasks) >= MAX_TASKS:
            return
        task = asyncio.get_running_loop().create_task(self._share(self._blobs, key, value, first_wins))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """What is not yet in the storage stays unshared. Safe to call twice."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    async def _share(self, blobs: BlobCache, key: str, value: bytes, first_wins: bool) -> None:
        with contextlib.suppress(StorageUnavailable):  # then it is this replica's own
            earlier = await blobs.get(key) if first_wins else None
            if earlier is None:
                await blobs.put(key, value, ttl_seconds=KEEP_SECONDS)
                if not first_wins:
                    return
                await asyncio.sleep(CONFIRM_SECONDS)
                earlier = await blobs.get(key)
            self._follow(key, earlier)

    def _follow(self, key: str, value: bytes | None) -> None:
        if value is not None and value != self._entries.get(key):
            self._set(key, value)
            self.generation += 1

    async def _stored(self, key: str) -> bytes | None:
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
