"""Counts which beginnings of prompts many calls have in common, such as a system prompt.

A beginning is counted at a ladder of lengths: 1, 2, 3, 4, 6, 8, 12, ... blocks. So a popular beginning is found up to a
third shorter than it is. Counts decay: half after `HALF_LIFE_CALLS` calls. At most `PREFIXES_MAX` beginnings are kept;
those whose last call is longest ago are forgotten first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from gateway.prefix.holders import LADDER

HALF_LIFE_CALLS = 256
PREFIXES_MAX = 32_768
_KEPT = 0.5 ** (1 / HALF_LIFE_CALLS)
CALLS_MAX = 1 / (1 - _KEPT)  # what the decayed counts of all calls add up to
MIN_CALLS = 3.0  # with a beginning, before it can be popular


class Popularity:
    """The popular beginnings of one fleet's prompts. Owned by the event loop."""

    def __init__(self) -> None:
        self._counts: OrderedDict[int, tuple[float, int]] = OrderedDict()  # by hash: count at a call, and that call
        self._calls = 0

    def note_call(self, chain: Sequence[int]) -> None:
        """A call with this prompt was sent."""
        self._calls += 1
        counts, blocks = self._counts, len(chain)
        for length in LADDER:
            if length > blocks:
                break
            prefix = chain[length - 1]
            count, at = counts.pop(prefix, (0.0, self._calls))
            counts[prefix] = count * _KEPT ** (self._calls - at) + 1.0, self._calls
        while len(counts) > PREFIXES_MAX:
            counts.popitem(last=False)

    def popular_blocks(self, chain: Sequence[int], min_share: float) -> tuple[int, float]:
        """The length in blocks of the beginning that at least `min_share` of the calls share, and their share.

        (0, 0.0) until a few calls were counted.
        """
        total = min(CALLS_MAX, float(self._calls))
        blocks, popular_share = 0, 0.0
        for length in LADDER:
            if length > len(chain) or (known := self._counts.get(chain[length - 1])) is None:
                break
            count, at = known
            share = count * _KEPT ** (self._calls - at) / total
            if count < MIN_CALLS or share < min_share:
                break
            blocks, popular_share = length, share
        return blocks, popular_share
