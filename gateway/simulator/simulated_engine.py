"""A simple model of an inference server: one prefill at a time, decoding beside it, an LRU prefix cache of blocks.

A prompt waits for those before it, computes what the cache does not have when its turn comes, and gives its first
chunk; then its answer takes the same time per token. As in the engines, the last block of a prompt that is cached
to its end is computed again. What the model leaves out: that decoding slows down prefilling, that running requests
fill the cache too, and that engines prefill several prompts at a time.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from gateway.prefix.cache_model import CacheModel
from gateway.prefix.fingerprint import BLOCK_TOKENS


@dataclass(slots=True, eq=False)
class PrefillJob:
    """One prompt at a server. `cached_tokens` is known when its prefill begins."""

    chain: tuple[int, ...]
    prompt_tokens: int
    cached_tokens: int = 0


class SimulatedEngine:
    def __init__(self, cache: CacheModel, prefill_tokens_per_second: float) -> None:
        self.cache = cache
        self.prefill_tokens_per_second = prefill_tokens_per_second
        self.queue: deque[PrefillJob] = deque()  # the first one is being prefilled
        self.requests = 0
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.busy_seconds = 0.0

    def submit(self, work: PrefillJob) -> float | None:
        """Seconds until its first chunk, if it is the only one; else `first_chunk` of another will say."""
        self.queue.append(work)
        return self._prefill() if len(self.queue) == 1 else None

    def first_chunk(self) -> tuple[PrefillJob, float | None]:
        """The first one has been computed. The seconds until the next one's first chunk, if there is one."""
        done = self.queue.popleft()
        return done, self._prefill() if self.queue else None

    def _prefill(self) -> float:
        work = self.queue[0]
        warm = self.cache.match(work.chain) * BLOCK_TOKENS
        if warm == work.prompt_tokens:
            warm -= BLOCK_TOKENS
        self.cache.add(work.chain)
        work.cached_tokens = warm
        self.requests += 1
        self.prompt_tokens += work.prompt_tokens
        self.cached_tokens += warm
        seconds = (work.prompt_tokens - warm) / self.prefill_tokens_per_second
        self.busy_seconds += seconds
        return seconds
