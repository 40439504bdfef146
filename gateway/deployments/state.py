"""The live state of one deployment: slots, calls in flight, cache model, speeds, circuit breaker.

Everything here is owned by the event loop and needs no locks.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Sequence
from functools import lru_cache

import xxhash

from gateway.deployments.background_slots import BackgroundSlots
from gateway.deployments.capabilities import MissingCapabilities
from gateway.deployments.circuit_breaker import CircuitBreaker
from gateway.deployments.evidence import Ejections, Evidence
from gateway.deployments.failure_log import FailureLog
from gateway.deployments.plan_limits import PlanLimits
from gateway.deployments.sent_call import SentCall
from gateway.deployments.token_rates import TokenRates
from gateway.policy import Deployment
from gateway.prefix.cache_runs import CachePrediction
from gateway.prefix.cache_slots import CacheSlots
from gateway.prefix.estimate import LOAD_VALID_SECONDS, Estimate
from gateway.prefix.events.block_index import BlockIndex
from gateway.prefix.fingerprint import BLOCK_TOKENS
from gateway.prefix.token_calibration import TokenCalibration
from gateway.prefix.working_set import RoutedPrompt, WorkingSet
from gateway.providers.base import Provider
from gateway.types import Usage

LOADS_FAILED_MAX = 3  # in a row, of blocks of other deployments; then it is not counted on for `LOADS_PAUSE_SECONDS`
LOADS_PAUSE_SECONDS = 10.0
FIRST_CHUNKS = 32  # newest times to the first chunk, kept for outlier detection


class DeploymentState:
    """One deployment: its provider, and everything that the gateway knows about it. Owned by the event loop."""

    def __init__(
        self,
        deployment: Deployment,
        provider: Provider,
        working_set: WorkingSet,
        outbox: deque[SentCall] | None = None,
        *,
        entry: str | None = None,
        identity: str | None = None,
    ) -> None:
        """`working_set` and `outbox` are shared by all deployments.

        Finished calls go to `outbox`, if there are peers. `entry` and `identity` are the template and the instance of a
        discovered deployment. Those of others are their name and their address.
        """
        self.name = deployment.name  # identifies the deployment across policy reloads
        self.entry = entry or deployment.name  # what the policy's models call it
        self.identity = identity or deployment.base_url
        self.breaker = CircuitBreaker()
        self.failures = FailureLog(self.name)
        self.evidence = Evidence()
        self.ejections = Ejections()
        self.missing = MissingCapabilities()
        self.configure(deployment, provider)
        self.working_set = working_set
        self.outbox = outbox
        self.cache_slots = (
            CacheSlots(deployment.slots, deployment.cache_tokens) if deployment.slots is not None else None
        )
        self.estimate = Estimate(deployment.cache_tokens, deployment.prefill_tokens_per_second, self.cache_slots)
        self.cache = self.estimate.cache
        self.token_calibration = TokenCalibration()
        self.token_rates = TokenRates()
        self.blocks: BlockIndex | None = None  # only of a deployment that publishes KV events
        self.input_billed = 0  # tokens in this gateway's receipts, to be compared with the engine's own counters
        self.output_billed = 0
        self.slots_taken = 0  # by permits
        self.background = BackgroundSlots()
        self._plan_limits = PlanLimits()
        self.loads_resume_at = 0.0  # until then, blocks are not expected to be loaded from other deployments
        self._loads_failed = 0  # in a row
        self.last_contact_at = 0.0  # of a call or a health check; event-loop seconds
        self.outlier_samples_since = -math.inf  # older samples of `first_chunks` do not count
        self.first_chunks: deque[tuple[float, float]] = deque(maxlen=FIRST_CHUNKS)  # (when, seconds)

    def configure(self, deployment: Deployment, provider: Provider) -> None:
        """Apply the policy's current settings. Safe while calls are in flight."""
        self.config = deployment
        self.provider = provider
        self.slots = deployment.max_concurrency
        self.kv_transfer_rate = deployment.kv_transfer_tokens_per_second
        self.role = deployment.role
        self.has_plan_limits = deployment.plan.requests is not None or deployment.plan.tokens is not None
        if self.ejections.reason:  # perhaps for what has been changed
            self.ejections.end()
            self.breaker.end_ejection()
        self.missing.clear()

    @property
    def shared_id(self) -> int:
        """Equal at all gateways that mean the same deployment, even while their policies differ during a rollout."""
        return _digest(self.config.name, self.identity, self.config.model)

    @property
    def unavailable_reason(self) -> str | None:
        """Why the deployment gets no requests, for operators; None if it gets some. Has no text of clients."""
        if self.ejections.reason:
            return f"ejected: {self.ejections.reason}"
        if self.breaker.open:
            return f"circuit breaker open: {self.failures.last_reason or 'it failed'}"
        return None

    def add_billed(self, usage: Usage) -> None:
        """Add the usage of a receipt."""
        self.input_billed += usage.input
        self.output_billed += usage.output
        if self.has_plan_limits and self.config.plan.tokens is not None:
            self._charge_plan(0, usage.output, asyncio.get_running_loop().time())

    def _charge_plan(self, requests: int, tokens: int, now: float) -> None:
        """Count what the plan's limits count. The deployment rests while one of them is used up."""
        plan, limits = self.config.plan, self._plan_limits
        pause_seconds = max(
            limits.charge("requests", plan.requests, requests, now), limits.charge("tokens", plan.tokens, tokens, now)
        )
        if pause_seconds > 0:
            self.breaker.wait_until(now + pause_seconds)

    @property
    def has_slot(self) -> bool:
        """Whether a slot is free. During the breaker's slow start there are fewer."""
        slots = self.slots
        if self.breaker.recovered_at is not None:
            slots = max(1, int(slots * self.breaker.slot_share(asyncio.get_running_loop().time())))
        return self.slots_taken < slots

    def has_room_for_background(self, now: float) -> bool:
        """Whether a background call may take a slot and leave enough of them for other calls."""
        if not self.has_slot:
            return False
        load = self.estimate.load
        if load is not None and load.waiting and now - load.at <= LOAD_VALID_SECONDS and self.background.taken:
            return False  # the engine reports that requests wait in its own queue
        urgent = self.slots_taken - self.background.taken
        return self.background.taken < self.background.limit(self.slots, urgent, now)

    def note_load(self, now: float, *, failed: bool) -> None:
        """A reply has shown whether blocks were loaded from another deployment, as they should have been."""
        self._loads_failed = self._loads_failed + 1 if failed else 0
        if self._loads_failed >= LOADS_FAILED_MAX:
            self.pause_loads(now)

    def pause_loads(self, now: float) -> None:
        """Expect no blocks to be loaded from other deployments for a while."""
        self._loads_failed, self.loads_resume_at = 0, now + LOADS_PAUSE_SECONDS

    def is_deprioritised(self, now: float) -> bool:
        """Whether other deployments should go first."""
        return self.breaker.is_deprioritised(now)

    @property
    def in_flight(self) -> int:
        """This gateway's calls that were sent and whose responses are not complete."""
        return self.estimate.in_flight

    def predict_cache(self, chain: Sequence[int], now: float) -> CachePrediction:
        """What the cache will hold of a prompt when its prefill begins.

        Without KV events, what the cache model holds now: evictions by queued prompts are not predicted.
        """
        if self.blocks is None:
            return self.estimate.cache.predict(chain)
        return self.estimate.predict_cache(chain, self.blocks.present_tokens, now)

    def expected_cached_tokens(self, prediction: CachePrediction) -> float:
        """How many tokens of a prompt are expected to be cached.

        If the engine reports all evictions, nothing is that is predicted to be evicted.
        """
        if self.blocks is not None and self.blocks.reports_all_evictions:
            return prediction.matched * BLOCK_TOKENS
        return self.estimate.expected_cached_tokens(prediction)

    def eviction_loss(self, computed_tokens: float, now: float) -> float:
        """The work that other calls will have to do again if `computed_tokens` are computed here."""
        blocks, estimate = self.blocks, self.estimate
        if blocks is None or estimate.capacity_engine_tokens is None:
            return estimate.eviction_loss(computed_tokens, None, now)
        return estimate.eviction_loss(computed_tokens, blocks.present_tokens, now)

    def send(
        self, call: RoutedPrompt, now: float, *, streams: bool = True, prediction: CachePrediction | None = None
    ) -> SentCall:
        """Record that a call is sent to this deployment now.

        `prediction` is the cache model's answer for the prompt, from when the deployment was chosen. It is used if it
        is still current.
        """
        if self.has_plan_limits:
            self._charge_plan(1, call.prompt_tokens_estimate, now)
        chain, estimate = call.fingerprint, self.estimate
        if prediction is None or prediction.version != estimate.cache.version:
            prediction = self.predict_cache(chain, now)
        conversation = self.working_set.begin(call, estimate, now, prediction)
        prompt = estimate.begin(chain, call.prompt_tokens_estimate, now, streams=streams, prediction=prediction)
        return SentCall(self, call, prompt, self.working_set, conversation)


@lru_cache(maxsize=4096)
def _digest(*names: str) -> int:
    return xxhash.xxh3_64_intdigest("\n".join(names).encode())
