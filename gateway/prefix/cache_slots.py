"""Model of a cache that keeps one prompt per slot, as llama.cpp's server does.

A slot processes one call at a time and keeps its prompt. The next call there reuses what both prompts begin with; the
rest is lost. So a conversation should return to its own slot. A new conversation should take the slot that has been
unused the longest, and not the one whose prompt happens to begin alike: that conversation would find nothing when it
returns.
"""

from __future__ import annotations

from collections.abc import Sequence

from gateway.prefix.cache_model import CacheModel
from gateway.prefix.cache_runs import CachePrediction, KnownBlocks, shared_blocks

CONTINUES_SHARE = 7 / 8  # of a slot's prompt: a prompt that begins with so much of it continues its conversation


class CacheSlots(CacheModel):
    """A `CacheModel` with one chain per slot. Adding a chain replaces the chain of the slot that `choose_slot` names.

    Responses teach it nothing: the slot holds their prompt afterwards, whatever it held before.
    """

    def __init__(self, slots: int, capacity_tokens: int) -> None:
        super().__init__(capacity_tokens)
        self._chains: list[Sequence[int]] = [()] * slots
        self._used = [0] * slots  # the clock at each slot's last call
        self._busy = [False] * slots
        self._newest: int | None = None

    def __len__(self) -> int:
        return sum(map(len, self._chains))

    def choose_slot(self, chain: Sequence[int]) -> int | None:
        """The slot that a prompt should go to; None if all are busy."""
        free = [slot for slot, busy in enumerate(self._busy) if not busy]
        if not free:
            return None
        shared = {slot: shared_blocks(self._chains[slot], chain) for slot in free}
        similar = [slot for slot in free if shared[slot] and shared[slot] >= CONTINUES_SHARE * len(self._chains[slot])]
        if similar:
            return max(similar, key=lambda slot: (shared[slot], self._used[slot]))
        return min(free, key=lambda slot: self._used[slot])

    def occupy(self) -> int | None:
        """Mark the slot that received the last chain as busy, and return it."""
        if self._newest is not None:
            self._busy[self._newest] = True
            self.version += 1
        return self._newest

    def release(self, slot: int) -> None:
        """The slot's call ended."""
        self._busy[slot] = False
        self.version += 1

    def record(self, slot: int, chain: Sequence[int]) -> None:
        """The slot holds this chain now; a peer may have sent it there."""
        if slot < len(self._chains):
            self.clock += 1
            self.version += 1
            self._chains[slot], self._used[slot] = chain, self.clock

    def match(self, chain: Sequence[int]) -> int:
        slot = self.choose_slot(chain)
        return 0 if slot is None else shared_blocks(self._chains[slot], chain)

    def known_blocks(self, chain: Sequence[int]) -> int:
        return max(shared_blocks(chain_held, chain) for chain_held in self._chains)

    def predict(self, chain: Sequence[int]) -> CachePrediction:
        slot = self.choose_slot(chain)
        matched = 0 if slot is None else shared_blocks(self._chains[slot], chain)
        ages = () if slot is None or not matched else ((matched, self._used[slot]),)
        return CachePrediction(matched, matched, ages, self.version, known=matched)

    def add(self, chain: Sequence[int], prediction: CachePrediction | None = None) -> None:
        self._newest = self.choose_slot(chain)
        if self._newest is not None:
            self.record(self._newest, chain)

    def remove(self, chain: Sequence[int]) -> None:
        for slot, chain_held in enumerate(self._chains):
            if chain and shared_blocks(chain_held, chain) == len(chain):
                self._chains[slot] = chain_held[: len(chain) - 1]
                self.version += 1

    def clear(self) -> None:
        self.version += 1
        self._chains = [()] * len(self._chains)

    def learn_cached(
        self, prediction: CachePrediction, reported_blocks: int, known: Sequence[KnownBlocks] | None = None
    ) -> None:
        pass
