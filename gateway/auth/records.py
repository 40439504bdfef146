"""Follows the storage's records of tenants and admin keys: one small read, every half second, of what has changed.

All records are in memory as JSON, so finding a tenant needs no storage operation. While the storage is unreachable, the
records that were read last stay in force.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping

from gateway.core.errors import StorageUnavailable
from gateway.storage.base import RECORDS_PER_READ, RecordStore, StoredRecord

POLL_SECONDS = 0.5  # all gateways see a change within a second

log = logging.getLogger(__name__)

Listener = Callable[[Mapping[str, StoredRecord]], None]
"""Is called with the records of one kind that have changed, by name. A deleted record has no value."""


class RecordFeed:
    """The present records of a storage. Call `refresh` once, and run `run` as a task. Must be used on one event loop.

    `has_read` is whether the records have been read since the start.
    """

    def __init__(self, store: RecordStore) -> None:
        self._store = store
        self._records: dict[str, dict[str, StoredRecord]] = {}  # by kind and name; without deleted ones
        self._revisions: dict[tuple[str, str], int] = {}  # of deleted records
        self._listeners: dict[str, list[Listener]] = {}
        self._position = ""
        self._lock = asyncio.Lock()
        self._is_away = False
        self.has_read = False

    @property
    def store_id(self) -> str:
        """The random id of the storage's data: another one after they were lost. Empty until the first read."""
        return self._position.partition(":")[0]

    def of_kind(self, kind: str) -> Mapping[str, StoredRecord]:
        """Return the records of one kind, by name."""
        return self._records.get(kind, {})

    def subscribe(self, kind: str, listener: Listener) -> None:
        """Register a listener for changes of one kind. It must not raise."""
        self._listeners.setdefault(kind, []).append(listener)

    async def run(self) -> None:
        """Read what has changed, forever."""
        while True:
            await asyncio.sleep(POLL_SECONDS)
            await self.try_to_refresh()

    async def try_to_refresh(self) -> None:
        """Read what has changed. Logs the beginning and the end of an outage of the storage."""
        try:
            await self.refresh()
        except StorageUnavailable as error:
            if not self._is_away:
                log.warning("changes of tenants and admin keys are not seen: %s", error.message)
            self._is_away = True
        else:
            if self._is_away:
                log.warning("changes of tenants and admin keys are seen again")
            self._is_away = False

    async def refresh(self) -> None:
        """Read what has changed. Raises `StorageUnavailable`."""
        async with self._lock:
            found, position, restarted = await self._store.records_since(self._position)
            records, more = list(found), len(found) == RECORDS_PER_READ
            while more:
                page, position, again = await self._store.records_since(position)
                records = list(page) if again else records + page
                more = len(page) == RECORDS_PER_READ
            self._apply(records, restarted=restarted)
            self._position, self.has_read = position, True

    async def change(self, kind: str, name: str, value: str | None) -> bool:
        """Replace or delete a record as it was when it was last read. Returns False if it has changed meanwhile.

        Raises `StorageUnavailable`.
        """
        known = self.of_kind(kind).get(name)
        before = known.revision if known is not None else self._revisions.get((kind, name), -1)
        changed = await self._store.change_record(StoredRecord(kind, name, value, before + 1))
        await self.refresh()
        return changed

    def _apply(self, records: list[StoredRecord], *, restarted: bool) -> None:
        changed: dict[str, dict[str, StoredRecord]] = {}
        if restarted:
            for kind, known in self._records.items():
                changed[kind] = {name: StoredRecord(kind, name, None) for name in known}
            self._records, self._revisions = {}, {}
        for record in records:
            changed.setdefault(record.kind, {})[record.name] = record
            of_kind = self._records.setdefault(record.kind, {})
            if record.value is None:
                of_kind.pop(record.name, None)
                self._revisions[record.kind, record.name] = record.revision
            else:
                of_kind[record.name] = record
        for kind, each in changed.items():
            for listener in self._listeners.get(kind, ()):
                listener(each)
