"""A small cache of fetched media in memory. Each tenant has its own entries, so none learns what others fetched."""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

ENTRY_BYTES = 1_000  # that an entry takes besides its data and its URL


class FetchedMedium(NamedTuple):
    """The content of a medium, in base64."""

    media_type: str
    data: str

    @property
    def data_url(self) -> str:
        """The content as a data URL."""
        return f"data:{self.media_type};base64,{self.data}"


class MediaCache:
    """Keeps the media that were used last, up to a number of bytes. Not thread-safe; times are event-loop seconds."""

    def __init__(self) -> None:
        self._entries: OrderedDict[tuple[str, str], tuple[FetchedMedium, float]] = OrderedDict()
        self._size_bytes = 0

    @property
    def size_bytes(self) -> int:
        """The bytes of all entries."""
        return self._size_bytes

    def get(self, tenant: str, url: str, now: float) -> FetchedMedium | None:
        """Return a medium that was fetched for the tenant and has not expired."""
        if (entry := self._entries.get((tenant, url))) is None:
            return None
        medium, expires_at = entry
        if now >= expires_at:
            self._remove(tenant, url)
            return None
        self._entries.move_to_end((tenant, url))
        return medium

    def put(self, tenant: str, url: str, medium: FetchedMedium, expires_at: float, max_bytes: int) -> None:
        """Keep a medium. Removes those that were not used for the longest time, down to `max_bytes` in all."""
        if (tenant, url) in self._entries:
            self._remove(tenant, url)
        self._entries[tenant, url] = (medium, expires_at)
        self._size_bytes += _size_of(url, medium)
        while self._entries and self._size_bytes > max_bytes:
            self._remove(*next(iter(self._entries)))

    def _remove(self, tenant: str, url: str) -> None:
        medium, _ = self._entries.pop((tenant, url))
        self._size_bytes -= _size_of(url, medium)


def _size_of(url: str, medium: FetchedMedium) -> int:
    return len(url) + len(medium.data) + ENTRY_BYTES
