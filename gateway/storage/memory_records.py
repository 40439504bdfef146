"""Records of administrators in the memory engine: a map, and the order of changes."""

from __future__ import annotations

from itertools import takewhile

from gateway.storage.base import RECORDS_PER_READ, RecordChanges, StoredRecord

_PREFIX = "memory:"


class MemoryRecords:
    """`RecordStore` for one process. The position is the number of changes."""

    def __init__(self) -> None:
        self._records: dict[tuple[str, str], tuple[int, StoredRecord]] = {}  # with the change's number, oldest first
        self._changes = 0

    def change(self, record: StoredRecord) -> bool:
        """Replace the previous revision of a record. Returns False if the stored revision is another one."""
        key = (record.kind, record.name)
        known = self._records.get(key)
        if record.revision != (0 if known is None else known[1].revision + 1):
            return False
        self._records.pop(key, None)
        self._changes += 1
        self._records[key] = (self._changes, record)
        return True

    def since(self, position: str) -> RecordChanges:
        """Return the records that have changed since a position."""
        after = int(position.removeprefix(_PREFIX) or 0)
        newer = list(takewhile(lambda change: change[0] > after, reversed(self._records.values())))
        found = newer[::-1][:RECORDS_PER_READ]
        last = found[-1][0] if found else after
        return RecordChanges([record for _, record in found], f"{_PREFIX}{last}", not position)
