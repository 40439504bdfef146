"""The strategy port: ranks the deployments of a model for one call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec

from gateway.deployments.state import DeploymentState
from gateway.prefix.cache_runs import CachePrediction
from gateway.prefix.working_set import RoutedPrompt


class Candidate(msgspec.Struct, frozen=True, gc=False):
    """A deployment as a strategy ranks it for one call, at one moment. Strategies sort by `cost_seconds`.

    The other fields explain the cost. Token counts are in fingerprint tokens, which are estimated from the text's
    length. No candidate is part of a cycle, and there may be a hundred for each call, so none is known to the garbage
    collector.
    """

    deployment: DeploymentState
    cost_seconds: float  # 0 if no other deployment was compared with it
    prompt_tokens: int
    matched_tokens: int
    queued_tokens: float  # uncached ones that are computed before this call's, as work (`prefix/prefill_speed.py`)
    in_flight: int
    ttft_seconds: float = 0.0  # predicted time to the first chunk; 0 if the strategy does not predict it
    prediction: CachePrediction | None = None  # of the deployment's cache; None if the strategy does not predict it
    block_source: Candidate | None = None  # from which it loads the beginning of the prompt (`block_source.py`)
    kv_transfer: msgspec.Raw | None = None  # if that is a prefill deployment: what it answered (`remote_prefill.py`)

    @property
    def reason(self) -> str:
        """The candidate in words, for spans, the dashboard and `warmpath explain`."""
        source = self.block_source
        loaded = "" if source is None else f" ({source.matched_tokens} {self._source_words})"
        return (
            f"{self.matched_tokens} of {self.prompt_tokens} prompt tokens predicted in cache{loaded}, "
            f"{self.queued_tokens:.0f} tokens queued ahead, "
            f"{self.in_flight} of {self.deployment.slots} slots in use"
        )

    @property
    def _source_words(self) -> str:
        source = self.block_source
        assert source is not None
        where = f"at {source.deployment.name}, to be loaded"
        return where if self.kv_transfer is None else f"computed {where}"


class Strategy(Protocol):
    """One way to choose a deployment. Stateless where possible; owned by the event loop."""

    def order(self, call: RoutedPrompt, deployments: Sequence[DeploymentState], now: float) -> list[Candidate]:
        """All deployments as candidates, best first. Changes no state, so it may be called without sending the call.

        `now` is in the seconds of the clock that the deployments' state uses: an event loop's, or the simulator's.
        """


class ServingStrategy(Strategy, Protocol):
    """A strategy of the router."""

    def only(self, call: RoutedPrompt, deployment: DeploymentState, now: float) -> Candidate:
        """The candidate if there is no other, as `order` makes it but without predicted seconds.

        They take most of the time of `order`, and nothing is compared with them. Changes no state.
        """
