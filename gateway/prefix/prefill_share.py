"""Learns how long deployments compute the prompts of calls that do not stream, from how long whole calls take.

The whole answer of such a call arrives at once, so it is not seen when its prompt was computed. For calls that were
alone at their deployment,

    seconds = computed_tokens * prefill + output_tokens * decode

Both constants are fitted by least squares; older calls count less. Long prompts with short answers, and the reverse,
tell the two apart. Before that, the deployment's measured speed says how long a prompt takes.
"""

from __future__ import annotations

from gateway.prefix.least_squares import NOTHING, measurement

KEPT = 0.98  # of the earlier calls' weight, with each call
CALLS_MIN = 8  # that teach the constants before they are used


class PrefillShare:
    """The constants of one deployment. Owned by the event loop."""

    def __init__(self) -> None:
        self._measured = NOTHING
        self._calls = 0
        self._seconds_per_token = 0.0

    def learn(self, computed_tokens: float, output_tokens: int, seconds: float) -> None:
        """A call that was alone and did not stream took so long."""
        if seconds <= 0 or computed_tokens < 0:
            return
        self._calls += 1
        self._measured = measurement(computed_tokens, output_tokens, seconds).plus(self._measured, KEPT)
        self._seconds_per_token = self._measured.fit()[0]

    def prefill_seconds(self, uncached_tokens: float, tokens_per_second: float) -> float:
        """How long a prompt with so many uncached tokens is computed. `tokens_per_second` is the measured speed."""
        if self._calls >= CALLS_MIN and self._seconds_per_token > 0:
            return uncached_tokens * self._seconds_per_token
        return uncached_tokens / tokens_per_second
