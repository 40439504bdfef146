"""Counts the blocks of a cache model by their last use, so that it can tell how many are newer than a given one.

That number is a block's *reuse distance*: a cache that evicts the least recently used blocks still has the block if its
capacity is larger. Uses are numbered by the model's clock. They are grouped into epochs of equally many uses, at most
`EPOCHS_MAX`, so a distance is exact to about a part in `EPOCHS_MAX`.
"""

from __future__ import annotations

EPOCHS_MAX = 512
EPOCHS_AHEAD = 32  # added in advance


class BlockAges:
    """The blocks of one cache model by their last use. Owned by the event loop."""

    def __init__(self) -> None:
        self._uses_per_epoch = 1
        self._first_epoch = 0
        self._end = 0  # the first clock behind the epochs
        self._blocks: list[int] = []  # by epoch, from `_first_epoch` on

    def change(self, clock: int, blocks: int) -> None:
        """So many blocks more, or fewer, were last used at this clock."""
        if clock >= self._end:
            self._extend(clock)
        self._blocks[clock // self._uses_per_epoch - self._first_epoch] += blocks

    def move(self, before: int, clock: int, blocks: int) -> None:
        """So many blocks, which were last used at `before`, are used at this clock."""
        if clock >= self._end:
            self._extend(clock)
        uses, first = self._uses_per_epoch, self._first_epoch
        self._blocks[before // uses - first] -= blocks
        self._blocks[clock // uses - first] += blocks

    def _extend(self, clock: int) -> None:
        """Add epochs up to that of this clock."""
        missing = clock // self._uses_per_epoch - self._first_epoch + 1 - len(self._blocks)
        # Some more, as far as they need no room, so that not every use adds one.
        missing += max(0, min(EPOCHS_AHEAD, EPOCHS_MAX - len(self._blocks) - missing))
        self._blocks.extend([0] * missing)
        while len(self._blocks) > EPOCHS_MAX:
            self._compact()
        self._end = (self._first_epoch + len(self._blocks)) * self._uses_per_epoch

    def newer_blocks(self, clock: int) -> int:
        """How many blocks were used after this clock. Half of those of the same epoch are taken to be newer."""
        index, uses = clock // self._uses_per_epoch - self._first_epoch, self._uses_per_epoch
        return sum(self._blocks[index + 1 :]) + self._blocks[index] * (uses - 1) // (2 * uses)

    def clear(self) -> None:
        """Forget all blocks."""
        self._blocks = [0] * len(self._blocks)

    def _compact(self) -> None:
        """Drop the oldest epochs if they are empty, or else join epochs in pairs."""
        empty = next((index for index, blocks in enumerate(self._blocks) if blocks), len(self._blocks) - 1)
        if empty:
            self._first_epoch += empty
            del self._blocks[:empty]
            return
        if self._first_epoch % 2:
            self._first_epoch -= 1
            self._blocks.insert(0, 0)
        if len(self._blocks) % 2:
            self._blocks.append(0)
        self._blocks = [one + other for one, other in zip(self._blocks[::2], self._blocks[1::2], strict=True)]
        self._first_epoch //= 2
        self._uses_per_epoch *= 2
