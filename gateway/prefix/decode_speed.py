"""Learns how much slower a deployment answers if it answers several calls at a time.

From a call's first chunk to its end, with n other calls in flight on average:

    seconds = output_tokens * (seconds_per_token + slowdown * n)

Both constants are fitted by least squares; older answers count less. The measurements of equal deployments are shared,
because few of them are ever as busy as a choice would make them.
"""

from __future__ import annotations

from gateway.prefix.least_squares import NOTHING, measurement

MIN_TOKENS = 4  # of an answer; shorter ones measure the network
OTHERS_MIN = 0.01  # calls, on average; fewer are rounding errors, which would make the slowdown absurd
KEPT = 0.98  # of the earlier measurements' weight, with each answer
MEAN_WEIGHT = 0.02  # of the newest answer, in the mean length


class DecodeSpeed:
    """The speed of equal deployments. Owned by the event loop."""

    def __init__(self) -> None:
        self.mean_output_tokens = 0.0
        self.mean_seconds = 0.0  # of an answer, from its first chunk on
        self.slowdown_seconds = 0.0  # per output token and other call in flight
        self.is_measured = False
        self._measured = NOTHING

    def learn(self, output_tokens: int, seconds: float, others: float) -> None:
        """An answer took `seconds` after its first chunk, with `others` other calls in flight on average."""
        weight = MEAN_WEIGHT if self.is_measured else 1.0
        self.mean_output_tokens += weight * (output_tokens - self.mean_output_tokens)
        self.mean_seconds += weight * (max(0.0, seconds) - self.mean_seconds)
        if output_tokens < MIN_TOKENS or seconds <= 0:
            return
        self.is_measured = True
        sample = measurement(output_tokens, output_tokens * others if others > OTHERS_MIN else 0.0, seconds)
        self._measured = sample.plus(self._measured, KEPT)
        self.slowdown_seconds = self._measured.fit()[1] if self._measured.ab else 0.0

    def slowdown_of(self, in_flight: float) -> float:
        """How many seconds later one answer of mean length ends because of `in_flight` other calls."""
        return self.mean_output_tokens * self.slowdown_seconds * in_flight
