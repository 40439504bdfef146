"""What we believe one server's prefix cache holds: the blocks we sent it, least recently used ones dropped first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from gateway.prefix.fingerprint import BLOCK_TOKENS


class CacheModel:
    """A bounded set of block hashes in order of use. Bounded by `capacity_tokens`."""

    def __init__(self, capacity_tokens: int) -> None:
        self.capacity_blocks = max(1, capacity_tokens // BLOCK_TOKENS)
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._blocks)

    def match(self, fingerprint: Sequence[int]) -> int:
        """How many leading blocks are believed to be there. Changes nothing."""
        for count, block in enumerate(fingerprint):
            if block not in self._blocks:
                return count
        return len(fingerprint)

    def add(self, fingerprint: Sequence[int]) -> None:
        """The server computes this prompt, or has. A chain's tail is older than its head, as in the engines."""
        for block in reversed(fingerprint[: self.capacity_blocks]):
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        while len(self._blocks) > self.capacity_blocks:
            self._blocks.popitem(last=False)

    def clear(self) -> None:
        """The server has restarted or dropped its cache."""
        self._blocks.clear()
