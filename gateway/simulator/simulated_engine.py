"""A simple model of an engine: one prefill at a time, decoding beside it, and an LRU prefix cache of blocks.

A prompt waits for the prompts before it. When its prefill begins, it computes what is not cached, in

    (prompt_tokens - cached_tokens) / prefill_tokens_per_second

seconds, which ends with its first chunk. Then its output takes a fixed time per token. As in real engines, the last
block of a fully cached prompt is computed again. The model leaves out that decoding slows down prefills, that running
requests use cache space, too, and that engines prefill several prompts at a time.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from gateway.prefix.cache_model import CacheModel
from gateway.prefix.fingerprint import BLOCK_TOKENS


@dataclass(slots=True, eq=False)
class PrefillJob:
    """One prompt at an engine. `cached_tokens` is known when its prefill begins."""

    chain: tuple[int, ...]
    prompt_tokens: int
    cached_tokens: int = 0


class SimulatedEngine:
    """One engine. Counts what it has served."""

    def __init__(self, cache: CacheModel, prefill_tokens_per_second: float) -> None:
        self.cache = cache
        self.prefill_tokens_per_second = prefill_tokens_per_second
        self.queue: deque[PrefillJob] = deque()  # the first one is being computed
        self.requests = 0
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.busy_seconds = 0.0

    def submit(self, work: PrefillJob) -> float | None:
        """Queue a prompt. Returns the seconds until its first chunk if the engine is idle, else None."""
        self.queue.append(work)
        return self._prefill() if len(self.queue) == 1 else None

    def first_chunk(self) -> tuple[PrefillJob, float | None]:
        """End the prefill of the first queued job. Returns it, and the seconds until the next job's first chunk."""
        done = self.queue.popleft()
        return done, self._prefill() if self.queue else None

    def _prefill(self) -> float:
        """Begin the first job's prefill, and return its duration in seconds."""
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
