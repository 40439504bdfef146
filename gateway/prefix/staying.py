"""When a conversation stays at the deployment that has it cached.

A move is chosen because it seems to gain most, often because a prediction is wrong. So few gains that are small beside
the errors of predictions come true, and every move computes a prompt again.
"""

from __future__ import annotations

from collections.abc import Iterable

from gateway.prefix.cache_runs import CachePrediction
from gateway.prefix.estimate import Estimate

STAY_ERRORS = 100  # what a move must gain, as a multiple of the mean error of predicted prefill times
STAY_MAX_SECONDS = 10.0  # and at most so much


def stay_seconds(prediction: CachePrediction, estimates: Iterable[Estimate]) -> float:
    """What another deployment must gain for a conversation to leave the one that has most of it cached.

    0 if the prompt does not continue or repeat one there. What several have in common is no reason to stay. The least
    of the deployments' errors counts: one of which predictions err because it is ill keeps no conversation.
    """
    if not prediction.repeats_prompt:
        return 0.0
    return min(STAY_MAX_SECONDS, STAY_ERRORS * min(estimate.speed.error_seconds for estimate in estimates))
