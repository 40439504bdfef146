"""The deployments of the current policy and their live state: slots, calls in flight, cache model, circuit breaker.

The queue takes slots here (`SlotPermit`), and the router ranks deployments by the state here (`DeploymentState`). The
policy says which deployments exist; `Fleet.apply` takes over a new one. State survives a policy reload for each
deployment whose address and model stay the same. `SentCall` follows one call at one deployment and feeds what its
response shows into the deployment's estimates. Everything here is owned by the event loop and needs no locks.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache

import xxhash

from gateway.deployments.capabilities import MissingCapabilities
from gateway.deployments.circuit_breaker import CircuitBreaker
from gateway.deployments.evidence import Ejections, Evidence, Quarantine
from gateway.deployments.failure_log import FailureLog
from gateway.deployments.token_rates import TokenRates
from gateway.policy import Deployment, Model, Policy
from gateway.prefix.cache_model import CachePrediction
from gateway.prefix.cache_slots import CacheSlots
from gateway.prefix.decode_speed import DecodeSpeed
from gateway.prefix.estimate import LOAD_VALID_SECONDS, Estimate, InFlightPrompt
from gateway.prefix.events.block_index import BlockIndex, FinishedCall
from gateway.prefix.fingerprint import text_bytes_of
from gateway.prefix.fleet_traffic import FleetTraffic
from gateway.prefix.prefill_speed import SpeedGroup
from gateway.prefix.token_calibration import TokenCalibration
from gateway.prefix.working_set import Conversation, RoutedPrompt, WorkingSet
from gateway.providers.base import Provider
from gateway.types import Usage

PEAK_DECAY_SECONDS = 60.0  # in which the peak of slots in use decays to 1/e
FIRST_CHUNKS = 32  # newest times to the first chunk, kept for outlier detection


class SentCall:
    """A call at a deployment, from the sending of its request to its end. Updates the deployment's estimates."""

    __slots__ = (
        "_conversation",
        "_working_set",
        "cache_slot",
        "deployment",
        "may_be_held",
        "predicted_cached_tokens",
        "prompt",
        "session",
        "usage",
    )  # fmt: skip

    def __init__(
        self,
        deployment: DeploymentState,
        call: RoutedPrompt,
        prompt: InFlightPrompt,
        working_set: WorkingSet,
        conversation: Conversation | None,
    ) -> None:
        self.deployment = deployment
        self.prompt = prompt
        self.cache_slot = None if deployment.cache_slots is None else deployment.cache_slots.occupy()
        self.session = call.session
        self.may_be_held = call.may_be_held
        self.usage: tuple[str, int, int, int] | None = None  # call id; input, cached and output tokens
        matched = prompt.prediction.matched
        # Computed now, because an equal prompt may finish first and change the calibration.
        self.predicted_cached_tokens = deployment.token_calibration.predict_cached_tokens(
            prompt.chain, matched, prompt.prompt_tokens
        )
        self._working_set = working_set
        self._conversation = conversation

    def first_chunk(self, now: float) -> None:
        """The first chunk arrived: the prompt has been computed."""
        self.deployment.estimate.first_chunk(self.prompt, now)

    def learn_cached(self, input_tokens: int, cached_tokens: int) -> None:
        """The response reported how many tokens of its prompt were cached.

        Both counts are in the engine's own tokens.
        """
        blocks = self.deployment.blocks
        evictions_reported = blocks is not None and blocks.reports_all_evictions
        self.deployment.estimate.learn_cached(
            self.prompt, input_tokens, cached_tokens, evictions_reported=evictions_reported
        )

    def learn_usage(self, call_id: str, input_tokens: int, cached_tokens: int, output_tokens: int) -> None:
        """Learn the engine's token counts from the response's usage, and attribute KV blocks to the call."""
        chain, matched, estimated_tokens = self.prompt.chain, self.prompt.prediction.matched, self.prompt.prompt_tokens
        self.deployment.token_calibration.learn(chain, matched, input_tokens, cached_tokens, output_tokens)
        if self.deployment.blocks is not None:
            text_bytes = text_bytes_of(chain, estimated_tokens)
            self.deployment.blocks.call_finished(
                FinishedCall(call_id, chain, text_bytes, input_tokens, cached_tokens, output_tokens)
            )
        self.usage = call_id, input_tokens, cached_tokens, output_tokens

    def end(self, now: float, *, answered: bool = True) -> None:
        """The response is complete, or will not arrive (`answered=False`). Call it once."""
        output_tokens = 0 if self.usage is None else self.usage[3]
        self.deployment.estimate.end(self.prompt, now, answered=answered, output_tokens=output_tokens)
        if self._conversation is not None:
            self._working_set.end(self._conversation, now)
        if self.cache_slot is not None and self.deployment.cache_slots is not None:
            self.deployment.cache_slots.release(self.cache_slot)
        if answered and self.deployment.outbox is not None:
            self.deployment.outbox.append(self)


class BackgroundSlots:
    """How many slots of one deployment background calls may use: calls whose class sets `hold`, such as batches.

    They may use the slots that other calls left free at their recent peak, which decays. One background call is allowed
    if there are no other calls.
    """

    __slots__ = ("_peak", "_peak_at", "taken")

    def __init__(self) -> None:
        self.taken = 0  # by background calls
        self._peak = 0.0  # slots that other calls used; decays from `_peak_at` on
        self._peak_at = -math.inf

    def note_urgent(self, count: int, now: float) -> None:
        """Other calls use `count` slots now."""
        self._peak, self._peak_at = count if count >= self._peak else max(count, self._decayed_peak(now)), now

    def limit(self, slots: int, urgent: int, now: float) -> int:
        """How many of `slots` background calls may use while other calls use `urgent` of them."""
        return max(slots - max(urgent, round(self._decayed_peak(now))), 0 if urgent else 1)

    def _decayed_peak(self, now: float) -> float:
        return self._peak * math.exp((self._peak_at - now) / PEAK_DECAY_SECONDS)


class DeploymentState:
    """One deployment: its provider, and everything that is known about it. Owned by the event loop."""

    def __init__(
        self,
        deployment: Deployment,
        provider: Provider,
        working_set: WorkingSet,
        outbox: deque[SentCall] | None = None,
    ) -> None:
        """`working_set` and `outbox` are shared by all deployments.

        Finished calls go to `outbox`, if there are peers.
        """
        self.name = deployment.name  # identifies the deployment across policy reloads
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
        self.last_contact_at = 0.0  # of a call or a health check; event-loop seconds
        self.outlier_samples_since = -math.inf  # older samples of `first_chunks` do not count
        self.first_chunks: deque[tuple[float, float]] = deque(maxlen=FIRST_CHUNKS)  # (when, seconds)

    def configure(self, deployment: Deployment, provider: Provider) -> None:
        """Apply the policy's current settings. Safe while calls are in flight."""
        self.config = deployment
        self.provider = provider
        self.slots = deployment.max_concurrency
        if self.ejections.reason:  # perhaps for what has been changed
            self.ejections.end()
            self.breaker.end_ejection()
        self.missing.clear()

    @property
    def shared_id(self) -> int:
        """Equal at all gateways that mean the same deployment, even while their policies differ during a rollout."""
        return _digest(self.config.name, self.config.base_url, self.config.model)

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

    @property
    def has_slot(self) -> bool:
        """Whether a slot is free. During the breaker's slow start there are fewer."""
        slots = self.slots
        if self.breaker.in_slow_start:
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

    def eviction_loss_tokens(self, computed_tokens: float, now: float) -> float:
        """Tokens that other calls will have to compute again if `computed_tokens` are computed here."""
        blocks, estimate = self.blocks, self.estimate
        if blocks is None or estimate.capacity_engine_tokens is None:
            return estimate.eviction_loss_tokens(computed_tokens, None, now)
        return estimate.eviction_loss_tokens(computed_tokens, blocks.present_tokens, now)

    def send(
        self, call: RoutedPrompt, now: float, *, streams: bool = True, prediction: CachePrediction | None = None
    ) -> SentCall:
        """Record that a call is sent to this deployment now.

        `prediction` is the cache model's answer for the prompt, from when the deployment was chosen. It is used if it
        is still current.
        """
        chain, estimate = call.fingerprint, self.estimate
        if prediction is None or prediction.version != estimate.cache.version:
            prediction = self.predict_cache(chain, now)
        conversation = self.working_set.begin(call, estimate, now, prediction.remembered)
        prompt = estimate.begin(chain, call.prompt_tokens_estimate, now, streams=streams, prediction=prediction)
        return SentCall(self, call, prompt, self.working_set, conversation)


class SlotPermit:
    """One slot of a deployment's concurrency, held by one call; a context manager. Releasing it twice is safe."""

    def __init__(self, fleet: Fleet, deployment: DeploymentState, *, background: bool = False) -> None:
        self._fleet = fleet
        self._background = background
        self._deployment: DeploymentState | None = deployment
        deployment.slots_taken += 1
        deployment.background.taken += background

    def __enter__(self) -> SlotPermit:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def move_to(self, deployment: DeploymentState) -> bool:
        """Exchange the slot for one at `deployment`. False, without a change, if none is free there."""
        if deployment is self._deployment:
            return True
        if self._deployment is None or not deployment.has_slot:
            return False
        previous, self._deployment = self._deployment, deployment
        deployment.slots_taken += 1
        deployment.background.taken += self._background
        self._fleet.give_back(previous, background=self._background)
        return True

    def is_at(self, deployment: DeploymentState) -> bool:
        """Whether the slot is one of this deployment's."""
        return self._deployment is deployment

    def swap(self, other: SlotPermit) -> None:
        """Exchange slots with another permit of the same call."""
        self._deployment, other._deployment = other._deployment, self._deployment

    def release(self) -> None:
        """Give the slot back."""
        if self._deployment is not None:
            previous, self._deployment = self._deployment, None
            self._fleet.give_back(previous, background=self._background)


class Fleet:
    """All deployments of the current policy. Calls `on_slot_free` whenever a slot may have become free."""

    def __init__(
        self,
        make_provider: Callable[[Deployment], Provider],
        share_of: Callable[[int], int] = lambda slots: slots,
        outbox: deque[SentCall] | None = None,
    ) -> None:
        """`share_of` maps a deployment's slots to this process's share of them, if several workers divide them.

        `outbox` receives finished calls, if there are peer gateways to inform.
        """
        self._make_provider = make_provider
        self._share_of = share_of
        self._outbox = outbox
        self._deployments: dict[str, DeploymentState] = {}
        # By a model's deployment names; filled on use
        self._by_names: dict[tuple[str, ...], list[DeploymentState]] = {}
        self.working_set = WorkingSet()
        self.quarantine = Quarantine()
        self.on_slot_free: Callable[[], None] = lambda: None
        # Bounded by the calls in flight
        self._pending_moves: dict[SlotPermit, tuple[Sequence[DeploymentState], asyncio.Future[None]]] = {}

    def apply(self, policy: Policy) -> None:
        """Take over a new policy. Calls in flight keep the deployments that they began with."""
        self._deployments = {d.name: self._deployment_for(d) for d in policy.deployments}
        self._share_measurements(policy.models)
        self._by_names.clear()
        self.on_slot_free()

    def _share_measurements(self, models: Sequence[Model]) -> None:
        """Let deployments that the policy describes as equal learn from each other, and those of a model of its users.

        What removed deployments measured is forgotten.
        """
        groups: dict[tuple[str, str, int], tuple[SpeedGroup, DecodeSpeed]] = {}
        for deployment in self._deployments.values():
            config, estimate = deployment.config, deployment.estimate
            key = config.provider, config.model, config.prefill_tokens_per_second
            speeds, decode = groups.setdefault(key, (SpeedGroup(), estimate.decode))
            speeds.add(estimate.speed)
            estimate.decode = decode
        shared: set[FleetTraffic] = set()
        for names in _joined_by_models(models):
            estimates = [self._deployments[name].estimate for name in names if name in self._deployments]
            # A policy that separates deployments leaves the common traffic to the first group.
            traffic = estimates[0].traffic if estimates[0].traffic not in shared else FleetTraffic()
            shared.add(traffic)
            for estimate in estimates:
                estimate.traffic = traffic

    def _deployment_for(self, deployment: Deployment) -> DeploymentState:
        slots = self._share_of(deployment.max_concurrency)
        if slots != deployment.max_concurrency:
            deployment = deployment.model_copy(update={"max_concurrency": slots})
        known = self._deployments.get(deployment.name)
        if known is None or _identity(known.config) != _identity(deployment):
            return DeploymentState(deployment, self._make_provider(deployment), self.working_set, self._outbox)
        if known.config != deployment:
            known.configure(deployment, self._make_provider(deployment))
        return known

    def __iter__(self) -> Iterator[DeploymentState]:
        return iter(self._deployments.values())

    def deployments_of(self, model: Model) -> Sequence[DeploymentState]:
        """The deployments of a model. Empty only if a reload removed those that an older call still names."""
        deployments = self._by_names.get(model.deployments)
        if deployments is None:
            deployments = [self._deployments[name] for name in model.deployments if name in self._deployments]
            self._by_names[model.deployments] = deployments
        return deployments

    def take(
        self, deployments: Sequence[DeploymentState], now: float, *, background: bool = False
    ) -> SlotPermit | None:
        """A slot at the least busy of these deployments, or None if all are full."""
        least_busy, least_share = None, math.inf
        for deployment in deployments:
            if deployment.breaker.open:  # then only deployments that admit a request may be chosen
                least_busy = _least_busy_admitting(deployments, now)
                break
            if deployment.has_slot and (load := deployment.slots_taken / deployment.slots) < least_share:
                least_busy, least_share = deployment, load
        if least_busy is None:
            return None
        permit = SlotPermit(self, least_busy, background=background)
        if not background:
            least_busy.background.note_urgent(least_busy.slots_taken - least_busy.background.taken, now)
        return permit

    def give_back(self, deployment: DeploymentState, *, background: bool = False) -> None:
        """Free a slot. A call that waits in `move_when_slot_free` gets it before queued calls do."""
        deployment.slots_taken -= 1
        deployment.background.taken -= background
        assert deployment.slots_taken >= 0
        # Calls whose deployment failed had a slot before, so they come before the queue.
        if self._pending_moves:
            self._move_one_to(deployment)
        self.on_slot_free()

    async def move_when_slot_free(
        self, permit: SlotPermit, deployments: Sequence[DeploymentState], seconds: float
    ) -> None:
        """Wait until one of the deployments has a free slot, and move the permit there; at most for `seconds`.

        Calls that wait here had a slot before and their deployment failed. They come before the calls in the queue.
        """
        moved = asyncio.get_running_loop().create_future()
        self._pending_moves[permit] = (deployments, moved)
        try:
            await asyncio.wait([moved], timeout=seconds)
        finally:
            self._pending_moves.pop(permit, None)

    def _move_one_to(self, deployment: DeploymentState) -> None:
        for permit, (deployments, moved) in self._pending_moves.items():
            if deployment in deployments and deployment.has_slot:
                del self._pending_moves[permit]
                permit.move_to(deployment)
                moved.set_result(None)
                return


@lru_cache(maxsize=4096)
def _digest(*names: str) -> int:
    return xxhash.xxh3_64_intdigest("\n".join(names).encode())


def _joined_by_models(models: Sequence[Model]) -> Iterator[dict[str, None]]:
    """The names of deployments in groups: two that serve one model are in one group, whatever else they serve."""
    group_of: dict[str, dict[str, None]] = {}
    for model in models:
        joined: dict[str, None] = {}
        for name in model.deployments:
            if name not in joined:
                joined |= group_of.get(name) or {name: None}
        group_of |= dict.fromkeys(joined, joined)
    while group_of:
        group = next(iter(group_of.values()))
        yield group
        for name in group:
            del group_of[name]


def _identity(deployment: Deployment) -> tuple[str, str, int | None]:
    """What identifies a deployment. If it changes, what was learned about the deployment no longer applies."""
    return deployment.base_url, deployment.model, deployment.slots


def _least_busy_admitting(deployments: Sequence[DeploymentState], now: float) -> DeploymentState | None:
    """The least busy deployment whose breaker admits a request. Used if some breaker is open.

    It returns None if all of those are full: waiting for a deployment that works is better than a slot at one that does
    not. If no breaker admits a request, any free deployment will do: the router then refuses the call.
    """
    admitting = [deployment for deployment in deployments if deployment.breaker.would_admit(now)]
    free = [deployment for deployment in admitting or deployments if deployment.has_slot]
    return min(free, key=lambda s: s.slots_taken / s.slots, default=None)
