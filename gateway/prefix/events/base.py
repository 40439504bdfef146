"""The port of the event sources: what an engine reports about its prefix cache, whatever its wire format.

A source runs as one task and calls its listener in the order in which the cache changed. Block hashes are the engine's
own. They identify blocks and reveal nothing about the content.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

BlockHash = int | bytes


class BlocksStored(NamedTuple):
    """Consecutive blocks that were added to the cache, each the child of the one before it.

    `parent` is the first one's parent; None at the beginning of a prompt. `session` is the session id that the engine
    received with the request that computed the blocks, or "".
    """

    hashes: tuple[BlockHash, ...]
    parent: BlockHash | None
    block_tokens: int
    session: str = ""


class BlocksRemoved(NamedTuple):
    """Blocks that were evicted."""

    hashes: tuple[BlockHash, ...]


class CacheEventListener(Protocol):
    """Receives the events of one engine, in order.

    `stored` and `removed` change the set of blocks that the engine has cached.
    """

    def stored(self, event: BlocksStored) -> None: ...

    def removed(self, event: BlocksRemoved) -> None: ...

    def cleared(self) -> None:
        """The cache is empty, or the engine was restarted."""

    def events_lost(self) -> None:
        """Events were lost and cannot be replayed: what was known may be wrong."""


class EventSource(Protocol):
    """Reads the events of one engine."""

    async def run(self) -> None:
        """Run until cancelled. Errors on the wire are retried, within named bounds, and never raised."""


class EventCounts:
    """Counters of one source, for metrics."""

    def __init__(self) -> None:
        self.batches = 0
        self.gaps = 0  # including those that a replay filled
        self.malformed = 0
