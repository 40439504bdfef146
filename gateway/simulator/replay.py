"""Virtual time: a heap of what happens next. The gateway's parts are told the time and do not know that it is not real.

A request comes, waits for its turn as `gateway.queueing` orders the waiting, goes where a strategy of
`gateway.routing` sends it, and its answer teaches `gateway.prefix` what a real one would: when the first chunk came,
and how many tokens were cached. A strategy sees of the servers what the gateway would see, and nothing else.
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
    """What is simulated: servers of one kind behind a gateway with this policy."""

    policy: Policy
    capacity_tokens: int  # of each server's cache
    prefill_tokens_per_second: float
    decode_seconds: float = 0.02
    gateways: int = 1  # that take the calls in turn
    share: bool = True  # and tell each other what they sent where


@dataclass(frozen=True, slots=True)
class SimulatedCall:
    """What a strategy and the queue have to know of a call, as `gateway.types.Call` has it."""

    fingerprint: tuple[int, ...]
    prompt_tokens_estimate: int
    session: str | None
    latency_class: LatencyClass
    class_name: str
    model: Model
    may_be_held: bool
    tenant_name: str = "t"  # one for all

    @property
    def tokens_estimate(self) -> int:
        return self.prompt_tokens_estimate


@dataclass(slots=True, eq=False)
class ReplayedRequest:
    """One request's story, in seconds of virtual time."""

    urgent: bool
    prompt_tokens: int
    came: float
    deployment: int = -1
    sent: float = 0.0
    first_chunk: float = 0.0
    finished: float = 0.0
    cached_tokens: int = 0
    predicted_tokens: int = 0


@dataclass(slots=True, eq=False)
class _Running:
    """A request on its way: a `Waiter` of the gateway's lines, as long as it stands there."""

    replay: Replay
    gateway: _Gateway
    session: TraceSession
    turn: int
    call: SimulatedCall
    served: ReplayedRequest
    permit: SlotPermit | None = None
    sent: SentCall | None = None
    done: bool = False  # nobody leaves here
    due: float = 0.0  # who came first goes first

    def grant(self, permit: SlotPermit) -> None:
        self.replay.wake(self, permit)

    def reject(self, error: GatewayError) -> None:
        raise AssertionError(error.message)


@dataclass(slots=True)
class ReplayResult:
    """All that was served, and what each server did for it."""

    served: list[ReplayedRequest] = field(default_factory=list)
    deployments: list[SimulatedEngine] = field(default_factory=list)
    capacity_tokens_believed: list[int] = field(default_factory=list)


class _Gateway:
    """One of several before the same servers: what it knows, and who waits there."""

    def __init__(self, site: SimulatedSite, strategy: Strategy, on_free: Callable[[_Gateway], None]) -> None:
        outbox = new_outbox() if site.gateways > 1 and site.share else None
        self.fleet = Fleet(lambda deployment: OfflineProvider(), outbox=outbox)
        self.fleet.apply(site.policy)
        self.fleet.on_slot_free = partial(on_free, self)
        self.deployments = self.fleet.deployments_of(site.policy.models[0])
        self.scheduler: QueueScheduler[_Running] = QueueScheduler(self.fleet)
        self.strategy = strategy
        self.peers = None if outbox is None else PeerReports(self.fleet, outbox)
        self.looking = False


class Replay:
    """One trace through one strategy. `holds`: whether the working set decides who may go, as far as the policy lets
    it. `hints`: whether clients name their conversations. `pooled`: one cache of all their capacity, the bound."""

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
        self._trace = trace
        self._policy = site.policy
        self._holds = holds
        self._hints = hints
        self._decode_seconds = site.decode_seconds
        names = site.policy.models[0].deployments
        shared = CacheModel(site.capacity_tokens * len(names)) if pooled else None
        self._simulated = [
            SimulatedEngine(
                CacheModel(site.capacity_tokens) if shared is None else shared, site.prefill_tokens_per_second
            )
            for _ in names
        ]
        caches = {name: simulated.cache for name, simulated in zip(names, self._simulated, strict=True)}
        self._gateways = [
            _Gateway(
                site, make_strategy(lambda deployment: caches[deployment.name]), lambda one: self._serve(one, self._now)
            )
            for _ in range(site.gateways)
        ]
        self._in_turn = cycle(self._gateways)
        self._exchanging = False
        self._work: dict[PrefillJob, _Running] = {}
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._numbers = count()
        self._now = 0.0
        self.outcome = ReplayResult(deployments=self._simulated)

    def run(self) -> ReplayResult:
        for session in self._trace.sessions:
            self._at(session.starts_at_seconds, partial(self._come, session, 0))
        while self._events:
            self._now, _, happen = heapq.heappop(self._events)
            happen(self._now)
        self.outcome.capacity_tokens_believed = [
            deployment.cache.capacity_tokens for gateway in self._gateways for deployment in gateway.deployments
        ]
        return self.outcome

    def _at(self, when: float, happen: Callable[[float], None]) -> None:
        heapq.heappush(self._events, (when, next(self._numbers), happen))

    def _come(self, session: TraceSession, turn: int, now: float) -> None:
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
        gateway = next(self._in_turn)
        running = _Running(
            self, gateway, session, turn, call, ReplayedRequest(session.urgent, request.prompt_tokens, now)
        )
        permit = gateway.scheduler.take_now(call, now)
        if permit is not None:
            self._granted(running, permit, now)
        else:
            gateway.scheduler.add(running, now)
            self._serve(gateway, now)

    def _serve(self, gateway: _Gateway, now: float) -> None:
        gateway.scheduler.grant_free_slots(now)
        if gateway.scheduler.has_held_calls and not gateway.looking:
            gateway.looking = True
            self._at(now + HELD_RECHECK_SECONDS, partial(self._look_again, gateway))

    def _look_again(self, gateway: _Gateway, now: float) -> None:
        gateway.looking = False
        self._serve(gateway, now)

    def _something_to_tell(self, gateway: _Gateway, now: float) -> None:
        if gateway.peers is not None and not self._exchanging:
            self._exchanging = True
            self._at(now + EXCHANGE_SECONDS, self._exchange)

    def _exchange(self, now: float) -> None:
        self._exchanging = False
        talking = [gateway.peers for gateway in self._gateways if gateway.peers is not None]
        for message in filter(None, [peers.make_message(now) for peers in talking]):
            for peers in talking:
                peers.receive(message, now)

    def wake(self, running: _Running, permit: SlotPermit) -> None:
        """Its turn has come: it goes on when whoever said so is done, as a task would."""
        self._at(self._now, partial(self._granted, running, permit))

    def _granted(self, running: _Running, permit: SlotPermit, now: float) -> None:
        """What the router does, and then what the server does."""
        call, gateway = running.call, running.gateway
        for candidate in gateway.strategy.order(call, gateway.deployments, now):
            if permit.move_to(candidate.deployment):
                break
        deployment = candidate.deployment
        running.permit = permit
        running.sent = deployment.send(call, now)
        served = running.served
        served.sent, served.deployment = now, gateway.deployments.index(deployment)
        served.predicted_tokens = running.sent.prompt.prediction.matched * BLOCK_TOKENS
        work = PrefillJob(call.fingerprint, call.prompt_tokens_estimate)
        self._work[work] = running
        seconds = self._simulated[served.deployment].submit(work)
        if seconds is not None:
            self._at(now + seconds, partial(self._first_chunk, served.deployment))
        self._something_to_tell(gateway, now)

    def _first_chunk(self, index: int, now: float) -> None:
        work, seconds = self._simulated[index].first_chunk()
        if seconds is not None:
            self._at(now + seconds, partial(self._first_chunk, index))
        running = self._work.pop(work)
        running.served.first_chunk, running.served.cached_tokens = now, work.cached_tokens
        assert running.sent is not None
        running.sent.first_chunk(now)
        self._something_to_tell(running.gateway, now)
        output_tokens = running.session.requests[running.turn].output_tokens
        self._at(now + output_tokens * self._decode_seconds, partial(self._finish, running))

    def _finish(self, running: _Running, now: float) -> None:
        served, session, turn = running.served, running.session, running.turn + 1
        assert running.sent is not None and running.permit is not None
        served.finished = now
        running.sent.learn_cached(served.prompt_tokens, served.cached_tokens)
        running.sent.end(now)
        self._something_to_tell(running.gateway, now)
        self.outcome.served.append(served)
        if turn < len(session.requests):
            self._at(now + session.requests[turn].after_seconds, partial(self._come, session, turn))
        running.permit.release()  # which serves who waits
