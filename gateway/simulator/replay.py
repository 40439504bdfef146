"""Replays one trace through one strategy, in virtual time: a heap of events, each with the time at which it happens.

A request arrives and waits for a slot as `gateway.queueing` orders it. A strategy of `gateway.routing` sends it to a
deployment. Its response teaches `gateway.prefix` what a real one would: when the first chunk came, and how many tokens
were cached. So a strategy sees of the deployments what the gateway would see, and nothing else. All these parts get the
time as an argument, so they are the very code that the gateway runs. `SimulatedEngine` stands for the engines.

All times are seconds of virtual time. With several gateways, arriving requests are dealt out in turn.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import count, cycle

from gateway.core.errors import GatewayError
from gateway.deployments.fleet import Fleet, SentCall, SlotPermit
from gateway.deployments.replica_sync import EXCHANGE_SECONDS, PeerReports, new_outbox
from gateway.policy import LatencyClass, Model, Policy
from gateway.prefix.cache_model import CacheModel
from gateway.prefix.fingerprint import BLOCK_TOKENS
from gateway.providers.base import OfflineProvider
from gateway.queueing.queue import HELD_RECHECK_SECONDS
from gateway.queueing.scheduler import QueueScheduler
from gateway.routing.base import Strategy
from gateway.simulator.baselines import ActualCache
from gateway.simulator.simulated_engine import PrefillJob, SimulatedEngine
from gateway.simulator.traces import TraceSession, TrafficTrace


@dataclass(frozen=True, slots=True)
class SimulatedSite:
    """What is simulated: deployments of one kind behind gateways with one policy."""

    policy: Policy
    capacity_tokens: int  # of each deployment's cache
    prefill_tokens_per_second: float  # of each engine
    decode_seconds: float = 0.02  # per output token
    gateways: int = 1
    syncs: bool = True  # whether several gateways exchange what they sent where (replica sync)


@dataclass(frozen=True, slots=True)
class SimulatedCall:
    """What strategies and the queue need to know of a call, as in `gateway.types.Call`."""

    fingerprint: tuple[int, ...]
    prompt_tokens_estimate: int
    session: str | None
    latency_class: LatencyClass
    class_name: str
    model: Model
    may_be_held: bool
    tenant_name: str = "t"  # all calls have one tenant

    @property
    def tokens_estimate(self) -> int:
        return self.prompt_tokens_estimate


@dataclass(slots=True, eq=False)
class ReplayedRequest:
    """The result of one request. Times are seconds of virtual time."""

    urgent: bool  # real-time; else batch
    prompt_tokens: int
    arrived: float
    deployment: int = -1  # index of the deployment it was sent to
    sent: float = 0.0
    first_chunk: float = 0.0
    finished: float = 0.0
    cached_tokens: int = 0
    predicted_tokens: int = 0  # cached tokens that the cache model predicted


@dataclass(slots=True, eq=False)
class _ReplayedCall:
    """A request in progress. While it is queued, it is a `Waiter` of the gateway's scheduler."""

    replay: Replay
    gateway: _Gateway
    session: TraceSession
    turn: int
    call: SimulatedCall
    record: ReplayedRequest
    permit: SlotPermit | None = None
    sent: SentCall | None = None
    done: bool = False  # no simulated client disconnects
    due: float = 0.0  # equal for all, so the order of arrival decides

    def grant(self, permit: SlotPermit) -> None:
        self.replay.send_later(self, permit)

    def reject(self, error: GatewayError) -> None:
        raise AssertionError(error.message)


@dataclass(slots=True)
class ReplayResult:
    """The results of all requests, and the engines that served them."""

    requests: list[ReplayedRequest] = field(default_factory=list)
    engines: list[SimulatedEngine] = field(default_factory=list)
    learned_capacity_tokens: list[int] = field(default_factory=list)  # per gateway and deployment


class _Gateway:
    """One gateway: its fleet, its queue, and its peer reports if there are other gateways."""

    def __init__(self, site: SimulatedSite, strategy: Strategy, on_free: Callable[[_Gateway], None]) -> None:
        outbox = new_outbox() if site.gateways > 1 and site.syncs else None
        self.fleet = Fleet(lambda deployment: OfflineProvider(), outbox=outbox)
        self.fleet.apply(site.policy)
        self.fleet.on_slot_free = partial(on_free, self)
        self.deployments = self.fleet.deployments_of(site.policy.models[0])
        self.scheduler: QueueScheduler[_ReplayedCall] = QueueScheduler(self.fleet)
        self.strategy = strategy
        self.peers = None if outbox is None else PeerReports(self.fleet, outbox)
        self.recheck_scheduled = False


class Replay:
    """Replays one trace through one strategy. Call `run` once."""

    def __init__(
        self,
        trace: TrafficTrace,
        site: SimulatedSite,
        make_strategy: Callable[[ActualCache], Strategy],
        *,
        holds: bool,
        hints: bool = False,
        pooled: bool = False,
    ) -> None:
        """`make_strategy` gets access to the engines' real caches, for baselines that know them.

        `holds`: the working set may hold calls, as far as the policy allows it. `hints`: clients name their
        conversations. `pooled`: all engines share one cache of their total capacity, as the upper bound of routing.
        """
        self._trace = trace
        self._policy = site.policy
        self._holds = holds
        self._hints = hints
        self._decode_seconds = site.decode_seconds
        names = site.policy.models[0].deployments
        shared = CacheModel(site.capacity_tokens * len(names)) if pooled else None
        self._engines = [
            SimulatedEngine(
                CacheModel(site.capacity_tokens) if shared is None else shared, site.prefill_tokens_per_second
            )
            for _ in names
        ]
        caches = {name: engine.cache for name, engine in zip(names, self._engines, strict=True)}
        self._gateways = [
            _Gateway(
                site,
                make_strategy(lambda deployment: caches[deployment.name]),
                lambda gateway: self._serve(gateway, self._now),
            )
            for _ in range(site.gateways)
        ]
        self._gateways_in_turn = cycle(self._gateways)
        self._sync_scheduled = False
        self._work: dict[PrefillJob, _ReplayedCall] = {}
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._event_numbers = count()
        self._now = 0.0
        self.result = ReplayResult(engines=self._engines)

    def run(self) -> ReplayResult:
        """Run all events and return the result."""
        for session in self._trace.sessions:
            self._at(session.starts_at_seconds, partial(self._arrive, session, 0))
        while self._events:
            self._now, _, action = heapq.heappop(self._events)
            action(self._now)
        self.result.learned_capacity_tokens = [
            deployment.cache.capacity_tokens for gateway in self._gateways for deployment in gateway.deployments
        ]
        return self.result

    def _at(self, when: float, action: Callable[[float], None]) -> None:
        heapq.heappush(self._events, (when, next(self._event_numbers), action))

    def _arrive(self, session: TraceSession, turn: int, now: float) -> None:
        """A session's request arrives: it takes a slot now, or is queued."""
        request = session.requests[turn]
        class_name = "realtime" if session.urgent else "batch"
        call = SimulatedCall(
            request.chain,
            request.prompt_tokens,
            session.name if self._hints else None,
            self._policy.classes[class_name],
            class_name,
            self._policy.models[0],
            self._holds and self._policy.classes[class_name].hold,
        )
        gateway = next(self._gateways_in_turn)
        replayed = _ReplayedCall(
            self, gateway, session, turn, call, ReplayedRequest(session.urgent, request.prompt_tokens, now)
        )
        permit = gateway.scheduler.take_now(call, now)
        if permit is not None:
            self._send(replayed, permit, now)
        else:
            gateway.scheduler.add(replayed, now)
            self._serve(gateway, now)

    def _serve(self, gateway: _Gateway, now: float) -> None:
        gateway.scheduler.grant_free_slots(now)
        if gateway.scheduler.has_held_calls and not gateway.recheck_scheduled:
            gateway.recheck_scheduled = True
            self._at(now + HELD_RECHECK_SECONDS, partial(self._recheck_held, gateway))

    def _recheck_held(self, gateway: _Gateway, now: float) -> None:
        gateway.recheck_scheduled = False
        self._serve(gateway, now)

    def _schedule_sync(self, gateway: _Gateway, now: float) -> None:
        if gateway.peers is not None and not self._sync_scheduled:
            self._sync_scheduled = True
            self._at(now + EXCHANGE_SECONDS, self._sync_peers)

    def _sync_peers(self, now: float) -> None:
        self._sync_scheduled = False
        reports = [gateway.peers for gateway in self._gateways if gateway.peers is not None]
        for message in filter(None, [peers.make_message(now) for peers in reports]):
            for peers in reports:
                peers.receive(message, now)

    def send_later(self, replayed: _ReplayedCall, permit: SlotPermit) -> None:
        """A queued request got a slot. It is sent after the current event, as a task would be woken."""
        self._at(self._now, partial(self._send, replayed, permit))

    def _send(self, replayed: _ReplayedCall, permit: SlotPermit, now: float) -> None:
        """What the router does, and then what the engine does."""
        call, gateway = replayed.call, replayed.gateway
        for candidate in gateway.strategy.order(call, gateway.deployments, now):
            if permit.move_to(candidate.deployment):
                break
        deployment = candidate.deployment
        replayed.permit = permit
        replayed.sent = deployment.send(call, now)
        record = replayed.record
        record.sent, record.deployment = now, gateway.deployments.index(deployment)
        record.predicted_tokens = replayed.sent.prompt.prediction.matched * BLOCK_TOKENS
        work = PrefillJob(call.fingerprint, call.prompt_tokens_estimate)
        self._work[work] = replayed
        seconds = self._engines[record.deployment].submit(work)
        if seconds is not None:
            self._at(now + seconds, partial(self._first_chunk, record.deployment))
        self._schedule_sync(gateway, now)

    def _first_chunk(self, index: int, now: float) -> None:
        work, seconds = self._engines[index].first_chunk()
        if seconds is not None:
            self._at(now + seconds, partial(self._first_chunk, index))
        replayed = self._work.pop(work)
        replayed.record.first_chunk, replayed.record.cached_tokens = now, work.cached_tokens
        assert replayed.sent is not None
        replayed.sent.first_chunk(now)
        self._schedule_sync(replayed.gateway, now)
        output_tokens = replayed.session.requests[replayed.turn].output_tokens
        self._at(now + output_tokens * self._decode_seconds, partial(self._finish, replayed))

    def _finish(self, replayed: _ReplayedCall, now: float) -> None:
        record, session, turn = replayed.record, replayed.session, replayed.turn + 1
        assert replayed.sent is not None and replayed.permit is not None
        record.finished = now
        replayed.sent.learn_cached(record.prompt_tokens, record.cached_tokens)
        replayed.sent.end(now)
        self._schedule_sync(replayed.gateway, now)
        self.result.requests.append(record)
        if turn < len(session.requests):
            self._at(now + session.requests[turn].after_seconds, partial(self._arrive, session, turn))
        replayed.permit.release()  # gives the slot to a queued request
