"""The port of the strategies: in which order the servers of a model are tried."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec

from gateway.deployments.fleet import DeploymentState
from gateway.prefix.cache_model import CachePrediction
from gateway.prefix.working_set import RoutedPrompt


class Candidate(msgspec.Struct, frozen=True):
    """A server as a strategy sees it for one call, at that moment. `cost_seconds` orders; the rest explains."""

    deployment: DeploymentState
    cost_seconds: float
    prompt_tokens: int
    matched_tokens: int
    queued_tokens: float  # uncached prompt tokens before it
    in_flight: int
    prediction: CachePrediction | None = None  # of its cache, where the strategy has asked

    @property
    def reason(self) -> str:
        return (
            f"{self.matched_tokens} of {self.prompt_tokens} prompt tokens warm, "
            f"{self.queued_tokens:.0f} queued before it, "
            f"{self.in_flight} of {self.deployment.slots} calls under way"
        )


class Strategy(Protocol):
    def order(self, call: RoutedPrompt, deployments: Sequence[DeploymentState], now: float) -> list[Candidate]:
        """All servers, the best first. Changes nothing, so that it can be asked without a call being sent. `now` is
        in the seconds in which the servers were told of theirs: an event loop's, or a simulator's."""
