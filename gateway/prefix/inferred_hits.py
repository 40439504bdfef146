"""Concludes from times what engines had cached that do not report it.

An engine computes prompts during the whole of a busy period (`prefill_speed.py`). So the period's length shows how many
tokens it computed, and the other tokens of the period's prompts were cached:

    computed_tokens = (seconds - prompts * overhead_seconds) * tokens_per_second

For several prompts together, this teaches the cache's capacity: a capacity is wrong if a cache of that size would have
had more, or less, of these prompts. For a prompt that was computed alone, a clear case also corrects what the model
takes to be cached.
"""

from __future__ import annotations

from gateway.prefix.cache_model import CacheModel
from gateway.prefix.fingerprint import BLOCK_TOKENS
from gateway.prefix.in_flight import InFlightPrompt
from gateway.prefix.prefill_speed import BusyPeriod, PrefillSpeed

HIT_MIN_SECONDS = 0.05  # that the hit of a prompt must save at least
HIT_MIN_ERRORS = 8.0  # and also so many times the mean error of predicted periods
CLEAR_SHARE = 0.25  # of what a hit saves: how far a clear case may be from a hit or a miss
PROMPTS_MAX = 256  # of a period; a longer one teaches nothing


class InferredHits:
    """The prompts of one deployment's current busy period. Owned by the event loop."""

    def __init__(self) -> None:
        self._period: BusyPeriod | None = None
        self._prompts: list[InFlightPrompt] = []

    def note(self, prompt: InFlightPrompt, period: BusyPeriod, speed: PrefillSpeed, cache: CacheModel) -> None:
        """A prompt was computed. If its period has ended, correct the model by what the period's length shows."""
        if period is not self._period:
            self._period, self._prompts = period, []
        if len(self._prompts) <= PROMPTS_MAX:
            self._prompts.append(prompt)
        if not period.seconds:
            return
        prompts, self._period, self._prompts = self._prompts, None, []
        # A period that has only parts of some prompts, or prompts of peers, shows nothing about its prompts.
        if not (period.usable and period.is_whole and speed.is_measured) or period.shared or len(prompts) > PROMPTS_MAX:
            return
        seconds = period.seconds - len(prompts) * speed.overhead_seconds
        if len(prompts) > 1 or not _learn_from_clear_case(prompt, seconds, speed, cache):
            _learn_capacity(prompts, seconds, speed, cache)


def _learn_from_clear_case(prompt: InFlightPrompt, seconds: float, speed: PrefillSpeed, cache: CacheModel) -> bool:
    """Correct the model if one prompt that was computed alone was certainly a hit, or certainly a miss."""
    prediction = prompt.prediction
    known_seconds = prediction.remembered * BLOCK_TOKENS / speed.tokens_per_second
    if known_seconds < _min_seconds(speed):
        return False
    miss_seconds = prompt.prompt_tokens / speed.tokens_per_second
    if abs(seconds - miss_seconds) < CLEAR_SHARE * known_seconds:
        cache.learn_cached(prediction, 0, prompt.known)
    elif seconds - (miss_seconds - known_seconds) < CLEAR_SHARE * known_seconds:
        cache.learn_cached(prediction, prediction.remembered, prompt.known)
    else:
        return False
    return True


def _learn_capacity(prompts: list[InFlightPrompt], seconds: float, speed: PrefillSpeed, cache: CacheModel) -> None:
    """Learn from how many of all these prompts' tokens were cached."""
    parts = [part for prompt in prompts for part in prompt.known]
    # Blocks that another prompt of the same period computes may be cached or not, whatever the capacity is.
    if sum(part.blocks for part in parts) != sum(prompt.prediction.remembered for prompt in prompts):
        return
    parts = [part for part in parts if not part.is_lost]
    known_seconds = sum(part.blocks for part in parts) * BLOCK_TOKENS / speed.tokens_per_second
    # Errors of several prompts even out.
    if known_seconds < (_min_seconds(speed) if len(prompts) == 1 else HIT_MIN_SECONDS * len(prompts)):
        return
    cached_tokens = sum(prompt.prompt_tokens for prompt in prompts) - seconds * speed.tokens_per_second
    cache.learn_capacity(parts, cached_tokens / BLOCK_TOKENS, is_surprise=True)


def _min_seconds(speed: PrefillSpeed) -> float:
    """What the hit of a prompt must save, so that it differs clearly from a miss."""
    return max(HIT_MIN_SECONDS, HIT_MIN_ERRORS * speed.error_seconds)
