"""The prompts that one deployment has still to compute: those that were sent and have no first chunk yet.

It is not seen when the prompts of calls that do not stream are computed, so these leave when they are predicted to be
(`take_due`). Lengths are in fingerprint tokens, and work is what `prefill_speed.py` says it is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from gateway.prefix.cache_model import CacheModel
from gateway.prefix.cache_runs import shared_blocks
from gateway.prefix.fingerprint import BLOCK_TOKENS
from gateway.prefix.in_flight import InFlightPrompt
from gateway.prefix.prefill_speed import PrefillSpeed

OVERDUE_SHARE = 0.5  # of the time that a prompt has taken longer than predicted: how long it will still take


class QueuedPrompts:
    """The queued prompts of one deployment, of this gateway only. Owned by the event loop."""

    def __init__(self, speed: PrefillSpeed, cache: CacheModel) -> None:
        self.prompts: dict[InFlightPrompt, None] = {}  # in sending order
        self.tokens = 0  # that are not cached, of all of them
        self.work = 0.0  # to compute these
        self.began_at = 0.0  # when the deployment could begin to compute the first of them
        self.unstreamed = 0  # how many of them belong to calls that do not stream
        self.unstreamed_due = math.inf  # when the first of those is predicted to be computed, or earlier
        self._speed = speed
        self._cache = cache
        self._uncached_max = 0  # no prompt of these has more `uncached_tokens`
        self._removals = 0  # the cache model's `removals` at the last `_recount`

    def add(self, prompt: InFlightPrompt) -> None:
        """A prompt was sent. If its call does not stream, its `prefilled_by` is set."""
        self.prompts[prompt] = None
        uncached_tokens = prompt.uncached_tokens
        if uncached_tokens > self._uncached_max:
            self._uncached_max = uncached_tokens
        self.tokens += uncached_tokens
        self.work += prompt.work
        if not prompt.streams:
            self.unstreamed += 1
            if prompt.prefilled_by < self.unstreamed_due:
                self.unstreamed_due = prompt.prefilled_by

    def remove(self, prompt: InFlightPrompt, now: float) -> None:
        """A prompt has been computed, or will not be."""
        prompts = self.prompts
        del prompts[prompt]
        self.unstreamed -= not prompt.streams
        self.tokens -= prompt.uncached_tokens
        self.began_at = now
        if prompts:
            self.work -= prompt.work
        else:
            self._uncached_max, self.work = 0, 0.0

    def take_due(self, now: float) -> list[InFlightPrompt]:
        """The prompts of calls that do not stream which are predicted to be computed by now. They are to be removed."""
        due = [prompt for prompt in self.prompts if prompt.prefilled_by <= now]
        self.unstreamed_due = min(
            [one.prefilled_by for one in self.prompts if one.prefilled_by > now], default=math.inf
        )
        return due

    def set_uncached(self, prompt: InFlightPrompt, uncached_tokens: int) -> None:
        """So many of its tokens are to be computed: other ones than were predicted when it was sent."""
        work = self._speed.work(prompt.prompt_tokens - uncached_tokens, prompt.prompt_tokens)
        self.tokens += uncached_tokens - prompt.uncached_tokens
        self.work += work - prompt.work
        prompt.uncached_tokens, prompt.work = uncached_tokens, work
        self._uncached_max = max(self._uncached_max, uncached_tokens)

    def tokens_left(self, now: float) -> float:
        """Tokens that are still to be computed, if the first prompt has been computed at the learned speed."""
        if not self.prompts:
            return 0.0
        first = self._first()
        done = max(0.0, self._done_work(first, now) / first.work) if first.work else 1.0
        return self.tokens - done * first.uncached_tokens

    def work_left(self, now: float) -> float:
        """What it takes to compute these, as a number of tokens at the beginning of a prompt."""
        return self.work - self._done_work(self._first(), now) if self.prompts else 0.0

    def seconds_until(self, prompt: InFlightPrompt, now: float) -> float:
        """How long it will take until this queued prompt is computed, and those before it."""
        speed, first = self._speed.fitted(), self._first()
        work, seconds = -self._done_work(first, now), 0.0
        for one in self.prompts:
            work += one.work
            seconds += speed.fitted_overhead_seconds
            if one is prompt:
                break
        return work / speed.fitted_tokens_per_second + seconds

    def _first(self) -> InFlightPrompt:
        """The prompt that is computed now, after all were looked at again whose cached blocks may be evicted."""
        if self._removals != self._cache.removals:
            self._recount()
        return next(iter(self.prompts))

    def _recount(self) -> None:
        """Raise `uncached_tokens` of prompts whose cached blocks were evicted meanwhile."""
        self._removals = self._cache.removals
        for prompt in self.prompts:
            uncached_tokens = prompt.prompt_tokens - self._cache.match(prompt.chain) * BLOCK_TOKENS
            if uncached_tokens > prompt.uncached_tokens:
                self.set_uncached(prompt, uncached_tokens)

    def _done_work(self, first: InFlightPrompt, now: float) -> float:
        """So much of it should be computed by now. If all of it should be, there was more of it than predicted.

        The longer it takes, the longer it will still take: `OVERDUE_SHARE` of the time since it should have ended.
        """
        speed = self._speed.fitted()
        done = (now - self.began_at) * speed.fitted_tokens_per_second
        if done < first.work:
            return done
        overdue = done - first.work - speed.fitted_overhead_seconds * speed.fitted_tokens_per_second
        return first.work - OVERDUE_SHARE * overdue if overdue > 0 else first.work

    def find_shared(self, chain: Sequence[int], min_uncached_tokens: float = 0.0) -> InFlightPrompt | None:
        """The prompt with the longest common prefix, if that prefix includes blocks that are not yet computed.

        Considers only prompts with at least `min_uncached_tokens`.
        """
        if self._uncached_max < min_uncached_tokens:
            return None
        best_match: InFlightPrompt | None = None
        longest_match = 0
        for prompt in [one for one in self.prompts if one.uncached_tokens >= min_uncached_tokens]:
            shared = shared_blocks(prompt.chain, chain)
            if shared > max(longest_match, prompt.prediction.matched):
                best_match, longest_match = prompt, shared
        return best_match
