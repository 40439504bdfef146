"""Send a call to the server with the smallest share of its places taken. For calls without a prefix to reuse."""

from __future__ import annotations

from collections.abc import Sequence

from gateway.deployments.fleet import DeploymentState
from gateway.prefix.working_set import RoutedPrompt
from gateway.routing.base import Candidate


class LeastBusy:
    def order(self, call: RoutedPrompt, deployments: Sequence[DeploymentState], now: float) -> list[Candidate]:
        candidates = [self._candidate(call, deployment, now) for deployment in deployments]
        return sorted(candidates, key=lambda c: (c.deployment.is_deprioritised(now), c.cost_seconds))

    def _candidate(self, call: RoutedPrompt, deployment: DeploymentState, now: float) -> Candidate:
        estimate, prompt = deployment.estimate, call.prompt_tokens_estimate
        queued, taken = estimate.queued_tokens(now), estimate.total_in_flight(now) / deployment.slots
        cost_seconds = (queued + prompt) / estimate.prefill_tokens_per_second + taken
        return Candidate(deployment, cost_seconds, prompt, 0, queued, estimate.in_flight)
