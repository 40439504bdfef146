"""The port of the event sources: what an engine says about its prefix cache, whatever its wire.

A source is run as one task and calls its listener in the order in which the cache changed. Hashes are the engine's own,
and opaque: they name blocks, and say nothing of what is in them.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

BlockHash = int | bytes


class BlocksStored(NamedTuple):
    """A run of blocks that can be found now, each the child of the one before it; the first one's parent may be None,
    at the beginning of a prompt. `session` is what the engine was told of the request that computed them, or ""."""

    hashes: tuple[BlockHash, ...]
    parent: BlockHash | None
    block_tokens: int
    session: str = ""


class BlocksRemoved(NamedTuple):
    hashes: tuple[BlockHash, ...]


class CacheEventListener(Protocol):
    def stored(self, event: BlocksStored) -> None: ...

    def removed(self, event: BlocksRemoved) -> None: ...

    def cleared(self) -> None:
        """The cache is empty, or the engine has been started anew."""

    def events_lost(self) -> None:
        """Events are missing that can not be had any more: whatever was known may be wrong."""


class EventSource(Protocol):
    async def run(self) -> None:
        """Until it is cancelled. What goes wrong on the wire is waited out, within named bounds, and never raised."""


class EventCounts:
    """What a source has come across, for metrics."""

    def __init__(self) -> None:
        self.batches = 0
        self.gaps = 0  # of which replays made up for some
        self.malformed = 0
