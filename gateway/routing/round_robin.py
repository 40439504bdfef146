"""The `round_robin` strategy: the next deployment in turn, whatever its cache or load. The baseline of comparisons."""

from __future__ import annotations

from collections.abc import Sequence

from gateway.deployments.state import DeploymentState
from gateway.prefix.fingerprint import BLOCK_TOKENS
from gateway.prefix.working_set import RoutedPrompt
from gateway.routing.base import Candidate


class RoundRobin:
    """Prefers the deployment whose newest call was sent the longest ago. One that was away makes up no missed turns."""

    def order(self, call: RoutedPrompt, deployments: Sequence[DeploymentState], now: float) -> list[Candidate]:
        turns = sorted(deployments, key=lambda deployment: (deployment.is_deprioritised(now), *_last_sent(deployment)))
        return [self.only(call, deployment, now) for deployment in turns]

    def only(self, call: RoutedPrompt, deployment: DeploymentState, now: float) -> Candidate:
        estimate, prompt = deployment.estimate, call.prompt_tokens_estimate
        matched = min(estimate.cache.match(call.fingerprint) * BLOCK_TOKENS, prompt)
        queued = estimate.queued_work(now)
        return Candidate(deployment, 0.0, prompt, matched, queued, estimate.in_flight)


def _last_sent(deployment: DeploymentState) -> tuple[float, int]:
    """Sort key: when the newest call was sent. The count of calls orders those sent in the same moment."""
    return deployment.estimate.last_sent_at, deployment.estimate.calls_sent
