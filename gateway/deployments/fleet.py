"""The deployments as they are now: places taken, work under way, what their caches hold, whether they answer.

The queue takes places here and the router chooses by what it sees here; the policy says what exists. State outlives
a policy reload for every deployment whose address and model stay the same.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence

from gateway.deployments.circuit_breaker import CircuitBreaker
from gateway.deployments.failure_log import FailureLog
from gateway.deployments.quarantine import Quarantine
from gateway.policy import Deployment, Model, Policy
from gateway.prefix.cache_model import CachePrediction
from gateway.prefix.cache_slots import CacheSlots
from gateway.prefix.estimate import LOAD_VALID_SECONDS, Estimate, InFlightPrompt
from gateway.prefix.events.block_index import BlockIndex, FinishedCall
from gateway.prefix.fingerprint import text_bytes_of
from gateway.prefix.token_calibration import TokenCalibration
from gateway.prefix.working_set import Conversation, RoutedPrompt, WorkingSet
from gateway.providers.base import Provider
from gateway.types import Usage

PEAK_DECAY_SECONDS = 60.0  # in which a busy moment fades to a third
FIRST_CHUNKS = 32  # of streams, remembered to compare servers by
SAME_CUT_SECONDS = 5.0  # in which answers break off that one and the same mishap has cut


class SentCall:
    """A call at a server, from its sending to its end: what is expected of the server follows it."""

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
        note: InFlightPrompt,
        working_set: WorkingSet,
        conversation: Conversation | None,
    ) -> None:
        self.deployment = deployment
        self.prompt = note
        self.cache_slot = None if deployment.cache_slots is None else deployment.cache_slots.take()
        self.session = call.session
        self.may_be_held = call.may_be_held
        self.usage: tuple[str, int, int, int] | None = None  # call id, input, cached and output tokens; as told below
        matched = note.prediction.matched
        # Known now: an equal prompt may end before this one does.
        self.predicted_cached_tokens = deployment.token_calibration.of(note.chain, matched, note.prompt_tokens)
        self._working_set = working_set
        self._conversation = conversation

    def first_chunk(self, now: float) -> None:
        self.deployment.estimate.first_chunk(self.prompt, now)

    def learn_cached(self, input_tokens: int, cached_tokens: int) -> None:
        """The reply said how many of its prompt's tokens were cached. In the engine's own tokens."""
        blocks = self.deployment.blocks
        evictions_reported = blocks is not None and blocks.reports_all_evictions
        self.deployment.estimate.learn_cached(
            self.prompt, input_tokens, cached_tokens, evictions_reported=evictions_reported
        )

    def learn_usage(self, call_id: str, input_tokens: int, cached_tokens: int, output_tokens: int) -> None:
        """The same reply, for what tokens prompts have; and of servers that tell of their blocks, which are this
        call's."""
        chain, matched, estimated = self.prompt.chain, self.prompt.prediction.matched, self.prompt.prompt_tokens
        self.deployment.token_calibration.learn(chain, matched, input_tokens, cached_tokens, output_tokens)
        if self.deployment.blocks is not None:
            text_bytes = text_bytes_of(chain, estimated)
            self.deployment.blocks.call_finished(
                FinishedCall(call_id, chain, text_bytes, input_tokens, cached_tokens, output_tokens)
            )
        self.usage = call_id, input_tokens, cached_tokens, output_tokens

    def end(self, now: float, *, answered: bool = True) -> None:
        """Its answer is over, or will not come. Once."""
        self.deployment.estimate.end(self.prompt, now, answered=answered)
        if self._conversation is not None:
            self._working_set.end(self._conversation, now)
        if self.cache_slot is not None and self.deployment.cache_slots is not None:
            self.deployment.cache_slots.give_back(self.cache_slot)
        if answered and self.deployment.outbox is not None:
            self.deployment.outbox.append(self)


class BackgroundSlots:
    """The calls of one server that may be held, as those of batches, and how much room there is for them: what was left
    by the others lately, at their busiest moment. Where none of the others is there, one of these may be, in any case.
    """

    __slots__ = ("_peak", "_peak_at", "taken")

    def __init__(self) -> None:
        self.taken = 0  # places that they have
        self._peak = 0.0  # of places that others had; it fades
        self._peak_at = -math.inf

    def note_urgent(self, count: int, now: float) -> None:
        self._peak, self._peak_at = count if count >= self._peak else max(count, self._decayed_peak(now)), now

    def limit(self, slots: int, urgent: int, now: float) -> int:
        return max(slots - max(urgent, round(self._decayed_peak(now))), 0 if urgent else 1)

    def _decayed_peak(self, now: float) -> float:
        return self._peak * math.exp((self._peak_at - now) / PEAK_DECAY_SECONDS)


class DeploymentState:
    """One deployment: its provider, and what is known about it. Owned by the event loop, changed without locks."""

    def __init__(
        self,
        deployment: Deployment,
        provider: Provider,
        working_set: WorkingSet,
        outbox: deque[SentCall] | None = None,
    ) -> None:
        self.name = deployment.name  # identifies it across reloads of the policy
        self.configure(deployment, provider)
        self.working_set = working_set  # of all servers
        self.outbox = outbox  # where calls go that are over, for other gateways; of all servers
        self.cache_slots = (
            CacheSlots(deployment.slots, deployment.cache_tokens) if deployment.slots is not None else None
        )
        self.estimate = Estimate(deployment.cache_tokens, deployment.prefill_tokens_per_second, self.cache_slots)
        self.cache = self.estimate.cache
        self.token_calibration = TokenCalibration()
        self.blocks: BlockIndex | None = None  # of a server that publishes KV events
        self.input_billed = 0  # tokens in the receipts of this gateway, to be held against the server's own count
        self.output_billed = 0
        self.slots_taken = 0  # by calls whose turn it is
        self.background = BackgroundSlots()
        self.breaker = CircuitBreaker()
        self.failures = FailureLog(self.name)
        self.last_cut = (-math.inf, 0)  # when answers last broke off here, and how many were under way then
        self.last_contact_at = 0.0  # by a call or a health check; event-loop seconds
        self.outlier_samples_since = -math.inf  # by these, to its peers: what came before is over and done with
        self.first_chunks: deque[tuple[float, float]] = deque(maxlen=FIRST_CHUNKS)  # (when, after how many seconds)

    def configure(self, deployment: Deployment, provider: Provider) -> None:
        """As the policy has it now; also while calls are under way."""
        self.config = deployment
        self.provider = provider
        self.slots = deployment.max_concurrency

    def billed(self, usage: Usage) -> None:
        self.input_billed += usage.input
        self.output_billed += usage.output

    def record_cut(self, now: float) -> None:
        """An answer breaks off, which is still under way; maybe others do, too, also of other gateways."""
        when, most = self.last_cut
        under_way = self.in_flight + self.estimate.peers.in_flight
        self.last_cut = now, max(under_way, most if now - when < SAME_CUT_SECONDS else 0)

    @property
    def has_slot(self) -> bool:
        slots = self.slots
        if self.breaker.in_slow_start:
            slots = max(1, int(slots * self.breaker.slot_share(asyncio.get_running_loop().time())))
        return self.slots_taken < slots

    def has_room_for_background(self, now: float) -> bool:
        """Whether a call that may be held can have a place, and leave enough for those that may not."""
        if not self.has_slot:
            return False
        load = self.estimate.load
        if load is not None and load.waiting and now - load.at <= LOAD_VALID_SECONDS and self.background.taken:
            return False  # it has more than it can work on
        urgent = self.slots_taken - self.background.taken
        return self.background.taken < self.background.limit(self.slots, urgent, now)

    def is_deprioritised(self, now: float) -> bool:
        """Others go first."""
        return self.breaker.is_deprioritised(now)

    @property
    def in_flight(self) -> int:
        """Calls that were sent and are not answered to the end."""
        return self.estimate.in_flight

    def predict_cache(self, chain: Sequence[int], now: float) -> CachePrediction:
        """What its cache will have of a prompt when its turn comes there; of one whose evictions nobody tells, what it
        is believed to have now."""
        if self.blocks is None:
            return self.estimate.cache.predict(chain)
        return self.estimate.predict_cache(chain, self.blocks.present_tokens, now)

    def eviction_loss_tokens(self, computed_tokens: float, now: float) -> float:
        """What others lose when so much is computed there; of one whose evictions nobody tells, as much."""
        if self.blocks is None or self.estimate.engine_tokens is None:
            return computed_tokens
        return self.estimate.eviction_loss_tokens(computed_tokens, self.blocks.present_tokens, now)

    def send(
        self, call: RoutedPrompt, now: float, *, streams: bool = True, prediction: CachePrediction | None = None
    ) -> SentCall:
        """A call goes to it now. `believed`: what its cache model said of the prompt when it was chosen."""
        chain, estimate = call.fingerprint, self.estimate
        if prediction is None or prediction.version != estimate.cache.version:
            prediction = self.predict_cache(chain, now)
        conversation = self.working_set.begin(call, estimate, now, prediction.remembered)
        note = estimate.begin(chain, call.prompt_tokens_estimate, now, streams=streams, prediction=prediction)
        return SentCall(self, call, note, self.working_set, conversation)


class SlotPermit:
    """One unit of a server's concurrency, held by one call from its turn to its end, by `with`. Released once; twice is
    safe."""

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
        """Hold a place at `deployment` instead. False, and nothing changes, when it has none."""
        if deployment is self._deployment:
            return True
        if self._deployment is None or not deployment.has_slot:
            return False
        left, self._deployment = self._deployment, deployment
        deployment.slots_taken += 1
        deployment.background.taken += self._background
        self._fleet.give_back(left, background=self._background)
        return True

    def is_at(self, deployment: DeploymentState) -> bool:
        return self._deployment is deployment

    def swap(self, other: SlotPermit) -> None:
        """Hold what the other one of the same call holds, and the other way round."""
        self._deployment, other._deployment = other._deployment, self._deployment

    def release(self) -> None:
        if self._deployment is not None:
            left, self._deployment = self._deployment, None
            self._fleet.give_back(left, background=self._background)


class Fleet:
    """All servers of the current policy. `on_free` is told whenever a server has a place again.

    `share_of` says how many of a server's places are ours, where several processes divide them. `told`, where other
    gateways are to be told of them, gets the calls that are over.
    """

    def __init__(
        self,
        make_provider: Callable[[Deployment], Provider],
        share_of: Callable[[int], int] = lambda slots: slots,
        outbox: deque[SentCall] | None = None,
    ) -> None:
        self._make_provider = make_provider
        self._share_of = share_of
        self._outbox = outbox
        self._deployments: dict[str, DeploymentState] = {}
        self._by_names: dict[
            tuple[str, ...], list[DeploymentState]
        ] = {}  # of this policy's models, as they are asked for
        self.working_set = WorkingSet()
        self.quarantine = Quarantine()
        self.on_slot_free: Callable[[], None] = lambda: None
        self._pending_moves: dict[
            SlotPermit, tuple[Sequence[DeploymentState], asyncio.Future[None]]
        ] = {}  # of calls in flight: so many

    def apply(self, policy: Policy) -> None:
        """Take over a new policy; a call in flight keeps the servers that it began with."""
        self._deployments = {d.name: self._deployment_for(d) for d in policy.deployments}
        self._by_names.clear()
        self.on_slot_free()

    def _deployment_for(self, deployment: Deployment) -> DeploymentState:
        slots = self._share_of(deployment.max_concurrency)
        if slots != deployment.max_concurrency:
            deployment = deployment.model_copy(update={"max_concurrency": slots})
        known = self._deployments.get(deployment.name)
        if known is None or _same(known.config) != _same(deployment):
            return DeploymentState(deployment, self._make_provider(deployment), self.working_set, self._outbox)
        if known.config != deployment:
            known.configure(deployment, self._make_provider(deployment))
        return known

    def __iter__(self) -> Iterator[DeploymentState]:
        return iter(self._deployments.values())

    def deployments_of(self, model: Model) -> Sequence[DeploymentState]:
        """Where a model is served. Empty only while a reload has taken away what an older call still names."""
        deployments = self._by_names.get(model.deployments)
        if deployments is None:
            deployments = [self._deployments[name] for name in model.deployments if name in self._deployments]
            self._by_names[model.deployments] = deployments
        return deployments

    def take(
        self, deployments: Sequence[DeploymentState], now: float, *, background: bool = False
    ) -> SlotPermit | None:
        """A place at the least busy of these, or None where all are full."""
        chosen, least = None, math.inf
        for deployment in deployments:
            if deployment.breaker.open:
                chosen = _least_busy_admitting(deployments, now)
                break
            if deployment.has_slot and (load := deployment.slots_taken / deployment.slots) < least:
                chosen, least = deployment, load
        if chosen is None:
            return None
        permit = SlotPermit(self, chosen, background=background)
        if not background:
            chosen.background.note_urgent(chosen.slots_taken - chosen.background.taken, now)
        return permit

    def give_back(self, deployment: DeploymentState, *, background: bool = False) -> None:
        deployment.slots_taken -= 1
        deployment.background.taken -= background
        assert deployment.slots_taken >= 0
        if self._pending_moves:
            self._move_one_to(deployment)
        self.on_slot_free()

    async def move_when_slot_free(
        self, permit: SlotPermit, deployments: Sequence[DeploymentState], seconds: float
    ) -> None:
        """Wait so long, or until one of the servers has a place: then `permit` is there. Who has had a turn, and whose
        server has failed, comes before those that wait for theirs."""
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


def _same(deployment: Deployment) -> tuple[str, str, int | None]:
    """What makes it another server, of which nothing is known."""
    return deployment.base_url, deployment.model, deployment.slots


def _least_busy_admitting(deployments: Sequence[DeploymentState], now: float) -> DeploymentState | None:
    """The least busy of those that may be asked now: waiting for one that works is better than a place at one that does
    not. Where none works, any will do: the router tells the caller so."""
    working = [deployment for deployment in deployments if deployment.breaker.would_admit(now)]
    free = [deployment for deployment in working or deployments if deployment.has_slot]
    return min(free, key=lambda s: s.slots_taken / s.slots, default=None)
