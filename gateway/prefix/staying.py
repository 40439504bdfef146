"""When a conversation stays at the deployment that has it cached.

A move is chosen because it seems to gain most, often because a prediction is wrong. So few gains that are small beside
the errors of predictions come true, and every move computes a prompt again.
"""

from __future__ import annotations

from gateway.prefix.cache_runs import CachePrediction
from gateway.prefix.prefill_speed import PrefillSpeed

STAY_ERRORS = 100  # what a move must gain, as a multiple of the mean error of predicted prefill times
STAY_MAX_SECONDS = 10.0  # and at most so much


def stay_seconds(prediction: CachePrediction, speed: PrefillSpeed) -> float:
    """What another deployment must gain for a prompt to leave the one that has most of it cached.

    0 if it does not repeat a whole prompt. What several conversations have in common is no reason to stay.
    """
    return min(STAY_MAX_SECONDS, STAY_ERRORS * speed.error_seconds) if prediction.repeats_prompt else 0.0
