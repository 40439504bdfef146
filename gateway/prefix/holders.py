"""Remembers which deployments computed a prompt's beginning last, so that few of many deployments need a closer look.

A prompt is remembered at the two longest lengths of a ladder that it reaches: 1, 2, 3, 4, 6, 8, 12, ... blocks. A later
prompt that continues it is looked up at all lengths of the ladder, from the longest down. At most `PREFIXES_MAX`
beginnings are kept, and `HOLDERS_MAX` deployments of each; those whose last call is longest ago are forgotten first.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Sequence
from typing import Generic, TypeVar

PREFIXES_MAX = 262_144
HOLDERS_MAX = 3
DEPLOYMENTS_MAX = 4096  # whose tuples are kept
LADDER = sorted({2**k for k in range(15)} | {3 * 2**k for k in range(14)})  # lengths in blocks

D = TypeVar("D")


class Holders(Generic[D]):
    """The holders of one fleet's prompts. Owned by the event loop."""

    def __init__(self) -> None:
        self._alone: dict[D, tuple[D]] = {}  # one tuple for each deployment, as most prefixes have one holder
        self._holders: OrderedDict[int, tuple[D, ...]] = OrderedDict()  # by the hash of the beginning; newest last

    def note_call(self, chain: Sequence[int], deployment: D) -> None:
        """A call with this prompt was sent to a deployment."""
        if len(self._alone) > DEPLOYMENTS_MAX:  # most have left the policy
            self._alone.clear()
        alone = self._alone.get(deployment) or self._alone.setdefault(deployment, (deployment,))
        reached = bisect_right(LADDER, len(chain))
        for length in LADDER[reached - 2 if reached > 2 else 0 : reached]:
            prefix = chain[length - 1]
            before = self._holders.pop(prefix, alone)
            if before is not alone:
                before = (*[one for one in before if one is not deployment][1 - HOLDERS_MAX :], deployment)
            self._holders[prefix] = before
        while len(self._holders) > PREFIXES_MAX:
            self._holders.popitem(last=False)

    def find(self, chain: Sequence[int]) -> tuple[D, ...]:
        """The deployments that computed most of the prompt, as far as is remembered."""
        for position in range(bisect_right(LADDER, len(chain)) - 1, -1, -1):
            if (found := self._holders.get(chain[LADDER[position] - 1])) is not None:
                return found
        return ()
