"""What one server holds whose cache is a prompt for each of its slots, as llama.cpp's is.

A slot works on one call at a time and keeps what that left behind: the next call there finds what both begin with, and
the rest is lost. So a conversation is to go back to its slot, and a new one to the slot that was left the longest ago:
not to the one that happens to begin alike, whose conversation would come back and find nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from gateway.prefix.cache_model import CacheModel, CachePrediction
from gateway.prefix.estimate import shared_blocks

GOES_ON_SHARE = 7 / 8  # of what a slot holds: a prompt that keeps so much goes on with it, and at most the rest is lost


class CacheSlots(CacheModel):
    """A `CacheModel` in which a chain is added to the slot that `choose` names, and replaces what that held. What
    replies say changes nothing: a slot that held something else holds their prompt since."""

    def __init__(self, slots: int, capacity_tokens: int) -> None:
        super().__init__(capacity_tokens)
        self._chains: list[Sequence[int]] = [()] * slots
        self._used = [0] * slots  # the clock at its last call
        self._busy = [False] * slots
        self._newest: int | None = None

    def __len__(self) -> int:
        return sum(map(len, self._chains))

    def choose(self, chain: Sequence[int]) -> int | None:
        """The slot to which a prompt should go. None where all are busy."""
        free = [slot for slot, busy in enumerate(self._busy) if not busy]
        if not free:
            return None
        shared = {slot: shared_blocks(self._chains[slot], chain) for slot in free}
        going_on = [slot for slot in free if shared[slot] and shared[slot] >= GOES_ON_SHARE * len(self._chains[slot])]
        if going_on:
            return max(going_on, key=lambda slot: (shared[slot], self._used[slot]))
        return min(free, key=lambda slot: self._used[slot])

    def take(self) -> int | None:
        """Occupy the slot to which the last chain was added."""
        if self._newest is not None:
            self._busy[self._newest] = True
            self.version += 1
        return self._newest

    def give_back(self, slot: int) -> None:
        self._busy[slot] = False
        self.version += 1

    def put(self, slot: int, chain: Sequence[int]) -> None:
        """Somebody has sent this to that slot."""
        if slot < len(self._chains):
            self.clock += 1
            self.version += 1
            self._chains[slot], self._used[slot] = chain, self.clock

    def match(self, chain: Sequence[int]) -> int:
        slot = self.choose(chain)
        return 0 if slot is None else shared_blocks(self._chains[slot], chain)

    def known_blocks(self, chain: Sequence[int]) -> int:
        return max(shared_blocks(held, chain) for held in self._chains)

    def predict(self, chain: Sequence[int]) -> CachePrediction:
        slot = self.choose(chain)
        matched = 0 if slot is None else shared_blocks(self._chains[slot], chain)
        ages = () if slot is None or not matched else ((matched, self._used[slot]),)
        return CachePrediction(matched, matched, ages, self.version)

    def add(self, chain: Sequence[int], prediction: CachePrediction | None = None) -> None:
        self._newest = self.choose(chain)
        if self._newest is not None:
            self.put(self._newest, chain)

    def remove(self, chain: Sequence[int]) -> None:
        for slot, held in enumerate(self._chains):
            if chain and shared_blocks(held, chain) == len(chain):
                self._chains[slot] = held[: len(chain) - 1]
                self.version += 1

    def clear(self) -> None:
        self.version += 1
        self._chains = [()] * len(self._chains)

    def learn(self, prediction: CachePrediction, reported: int) -> None:
        pass
