"""The `least_busy` strategy: sends a call to the deployment with the smallest share of its slots in use.

The cost in seconds is `(queued + prompt) / prefill rate + in flight / slots`, where both prompts are work
(`gateway/prefix/prefill_speed.py`). It ignores prefix caches, which suits embeddings.
"""

from __future__ import annotations

from collections.abc import Sequence

from gateway.deployments.state import DeploymentState
from gateway.prefix.working_set import RoutedPrompt
from gateway.routing.base import Candidate


class LeastBusy:
    """Ranks deployments by queued prompt tokens and by their share of slots in use."""

    def order(self, call: RoutedPrompt, deployments: Sequence[DeploymentState], now: float) -> list[Candidate]:
        candidates = [self.only(call, deployment, now) for deployment in deployments]
        return sorted(candidates, key=lambda c: (c.deployment.is_deprioritised(now), c.cost_seconds))

    def only(self, call: RoutedPrompt, deployment: DeploymentState, now: float) -> Candidate:
        estimate, prompt = deployment.estimate, call.prompt_tokens_estimate
        queued, taken = estimate.queued_work(now), estimate.total_in_flight(now) / deployment.slots
        cost_seconds = (queued + estimate.speed.work(0, prompt)) / estimate.prefill_tokens_per_second + taken
        return Candidate(deployment, cost_seconds, prompt, 0, queued, estimate.in_flight)
