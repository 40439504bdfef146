"""Concludes from times what engines had cached that do not report it.

An engine computes prompts during the whole of a busy period. So the period's length shows how much work that was
(`prefill_speed.py` says what work is), and the rest of the period's prompts was cached:

    work = (seconds - prompts * overhead_seconds) * tokens_per_second

For several prompts together, this teaches the cache's capacity: a capacity is wrong if a cache of that size would have
had more, or less, of these prompts. Parts of a longer period do, too: engines compute prompts in the order in which
they arrive, so a part has all of its prompts, except for what is left of the first one. Otherwise nothing would be
learned of engines that are never idle, where it matters most. For a prompt that was computed alone, a clear case also
corrects what the model takes to be cached.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate

from gateway.prefix.cache_model import CacheModel
from gateway.prefix.cache_runs import CachePrediction
from gateway.prefix.fingerprint import BLOCK_TOKENS
from gateway.prefix.in_flight import InFlightPrompt
from gateway.prefix.learned_capacity import Piece, pieces_of
from gateway.prefix.prefill_speed import BusyPeriod, PrefillSpeed

HIT_MIN_SECONDS = 0.05  # that the hit of a prompt must save at least
HIT_MIN_ERRORS = 8.0  # and also so many times the mean error of predicted periods
CLEAR_SHARE = 0.25  # of what a hit saves: how far a clear case may be from the time that it explains
CONTRADICTION_SHARE = 0.1  # of a period's length: a smaller error of a prediction may be one of the speed
CLEAR_FACTOR = 2.0  # times the rest of a period: what takes longer was lost, since no error of the speed is so large
ERROR_WEIGHT = 0.1  # of the newest prompt, in the mean error
PROMPTS_MAX = 256  # of a period; a longer one teaches nothing


class InferredHits:
    """The prompts of one deployment's current busy period. Owned by the event loop."""

    def __init__(self) -> None:
        self._period: BusyPeriod | None = None
        self._prompts: list[InFlightPrompt] = []
        self._error_seconds = 0.0  # by which the times of prompts differ from the closest explanation, as a mean

    def note(self, prompt: InFlightPrompt, period: BusyPeriod, speed: PrefillSpeed, cache: CacheModel) -> None:
        """A prompt was computed. If its period has ended, correct the model by what the period's length shows."""
        if period is not self._period:
            self._period, self._prompts = period, []
        if len(self._prompts) <= PROMPTS_MAX:
            self._prompts.append(prompt)
        if not period.seconds:
            return
        prompts, self._period, self._prompts = self._prompts, None, []
        # A period that has prompts of peers shows nothing about ours.
        if not (period.usable and speed.is_measured) or period.shared or len(prompts) > PROMPTS_MAX:
            return
        seconds = period.seconds - len(prompts) * speed.overhead_seconds
        is_alone = period.is_whole and len(prompts) == 1
        if not is_alone or not self._learn_from_clear_case(prompt, seconds, speed, cache):
            self._learn_capacity(prompts, seconds, speed, cache)

    def _learn_from_clear_case(
        self, prompt: InFlightPrompt, seconds: float, speed: PrefillSpeed, cache: CacheModel
    ) -> bool:
        """Correct the model if it is clear how many blocks of a prompt that was computed alone were cached.

        Engines evict whole runs first, so the cached part usually ends where a run ends. The length that explains the
        time best is taken. If it is not the predicted one, the difference must be clear, because the model then drops
        or restores everything that was used before.
        """
        prediction = prompt.prediction
        # What it saves that so many blocks are cached; those of the last answer may be cached besides.
        saved = {
            blocks: speed.work(0, blocks * BLOCK_TOKENS) / speed.tokens_per_second
            for blocks in (prediction.matched, *_ends_of_runs(prediction), prediction.remembered)
        }
        known_seconds = saved[prediction.remembered]
        saved_seconds = min(speed.work(0, prompt.prompt_tokens) / speed.tokens_per_second - seconds, known_seconds)
        errors = {blocks: abs(saved_seconds - of_blocks) for blocks, of_blocks in saved.items()}
        cached_blocks = min(errors, key=errors.__getitem__)
        self._error_seconds += ERROR_WEIGHT * (errors[cached_blocks] - self._error_seconds)
        min_seconds, clear_seconds = self._min_seconds(speed), known_seconds
        if cached_blocks != prediction.matched:
            clear_seconds = abs(saved[cached_blocks] - saved[prediction.matched])
            min_seconds = max(min_seconds, CONTRADICTION_SHARE * seconds)
        if clear_seconds < min_seconds or errors[cached_blocks] >= CLEAR_SHARE * clear_seconds:
            return False
        cache.learn_cached(prediction, cached_blocks, prompt.known)
        return True

    def _learn_capacity(
        self, prompts: list[InFlightPrompt], seconds: float, speed: PrefillSpeed, cache: CacheModel
    ) -> None:
        """Learn from how much work the blocks saved that all these prompts found cached."""
        # Blocks that another prompt of the same period computes may be cached or not, whatever the capacity is.
        known_blocks = sum(part.blocks for prompt in prompts for part in prompt.known)
        if known_blocks != sum(prompt.prediction.remembered for prompt in prompts):
            return
        pieces = [piece for prompt in prompts for piece in _pieces(prompt, speed)]
        known_work = sum(work for _, work in pieces)
        rate = speed.tokens_per_second
        # Errors of several prompts even out.
        min_seconds = self._min_seconds(speed) if len(prompts) == 1 else HIT_MIN_SECONDS * len(prompts)
        if known_work < min_seconds * rate:
            return
        saved_work = sum(speed.work(0, prompt.prompt_tokens) for prompt in prompts) - seconds * rate
        lost_seconds = (known_work - saved_work) / rate
        # Neither an error of the speed nor a restart explains that much of it was lost, and not all.
        is_cut = (
            lost_seconds > max(self._min_seconds(speed), CLEAR_FACTOR * (seconds - lost_seconds))
            and CONTRADICTION_SHARE * known_work < saved_work < (1 - CONTRADICTION_SHARE) * known_work
        )
        cache.learn_capacity(pieces, saved_work, responses=len(prompts), is_surprise=True, ends_guess=is_cut)

    def _min_seconds(self, speed: PrefillSpeed) -> float:
        """What cached blocks must save, so that their times differ clearly from those of uncached ones."""
        return max(HIT_MIN_SECONDS, HIT_MIN_ERRORS * max(speed.error_seconds, self._error_seconds))


def _pieces(prompt: InFlightPrompt, speed: PrefillSpeed) -> Iterator[Piece]:
    """The known parts of a prompt that are not lost, in pieces that count as much as it is work to compute them."""
    start = 0
    for part in prompt.known:
        if not part.is_lost:
            for distance, place, length in pieces_of(part.distance, part.blocks):
                begin = start + place
                yield distance, speed.work(begin * BLOCK_TOKENS, (begin + length) * BLOCK_TOKENS)
        start += part.blocks


def _ends_of_runs(prediction: CachePrediction) -> Iterator[int]:
    """The lengths in blocks at which the cached part of a prompt may end; the last one is at `remembered`."""
    ends = accumulate((blocks for _, blocks in prediction.reused), initial=0)
    yield from (end for end in ends if end <= prediction.remembered)
