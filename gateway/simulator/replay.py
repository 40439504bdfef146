"""Replays one trace through one strategy, in virtual time: a heap of events, each with the time at which it happens.

A request arrives and waits for a slot as `gateway.queueing` orders it. A strategy of `gateway.routing` sends it to a
deployment. Its response teaches `gateway.prefix` what a real one would: when the first chunk came, how many tokens were
cached, and, if the site's engines report so much, which blocks are in the cache. So a strategy sees of the deployments
what the gateway would see, and nothing else. All these parts get the time as an argument, so they are the very code
that the gateway runs. `SimulatedEngine` stands for the engines, and `engine_publisher.py` for what they publish.

All times are seconds of virtual time. With several gateways, arriving requests are dealt out in turn.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count, cycle, islice

from gateway.core.errors import GatewayError
from gateway.deployments.fleet import Fleet
from gateway.deployments.replica_sync import EXCHANGE_SECONDS, PeerReports, new_outbox
from gateway.deployments.sent_call import SentCall
from gateway.deployments.slot_permit import SlotPermit
from gateway.deployments.state import DeploymentState
from gateway.policy import LatencyClass, Model
from gateway.prefix.fingerprint import BLOCK_TOKENS
from gateway.providers.offline import OfflineProvider
from gateway.queueing.queue import HELD_RECHECK_SECONDS
from gateway.queueing.scheduler import QueueScheduler
from gateway.routing.base import Candidate, Strategy
from gateway.routing.block_source import with_block_source
from gateway.routing.shared_prefill import find_shared_prefill, find_source_prefill
from gateway.simulator.baselines import ActualEngine
from gateway.simulator.engine_cache import EngineCache
from gateway.simulator.engine_publisher import EVENTS_SECONDS, METRICS_SECONDS, EnginePublisher
from gateway.simulator.engine_steps import EngineJob
from gateway.simulator.simulated_engine import SimulatedEngine
from gateway.simulator.site import Reports, Restart, SimulatedSite
from gateway.simulator.traces import EnginePrompt, TraceSession, TrafficTrace


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
    tenant_path: tuple[str, ...] = ("t",)

    @property
    def tokens_estimate(self) -> int:
        return self.prompt_tokens_estimate


@dataclass(slots=True, eq=False)
class ReplayedRequest:
    """The result of one request. Times are seconds of virtual time."""

    urgent: bool  # real-time; else batch
    prompt_tokens: int
    arrived: float
    output_tokens: int = 1
    deployment: int = -1  # index of the deployment it was sent to
    sent: float = 0.0
    first_chunk: float = 0.0
    finished: float = 0.0
    cached_tokens: int = 0
    predicted_tokens: int = 0  # cached tokens that the cache model predicted
    rejections: int = 0  # because the queue was full, after which the client tried again


@dataclass(slots=True)
class _Load:
    """A request's engine loads blocks from another one, which then keeps the first `kept` of them; None: all."""

    source: Candidate
    kept_blocks: int | None = None


@dataclass(slots=True, eq=False)
class _ReplayedCall:
    """A request in progress. While it is queued, it is a `Waiter` of the gateway's scheduler."""

    replay: Replay
    gateway: _Gateway
    session: TraceSession
    turn: int
    call: SimulatedCall
    record: ReplayedRequest
    job: EngineJob
    permit: SlotPermit | None = None
    sent: SentCall | None = None
    load: _Load | None = None
    waits_for_prefix: bool = False  # it waited for one that another call's prefill computed
    done: bool = False  # no simulated client disconnects
    due: float = math.inf  # equal for all, so the order of arrival decides

    def grant(self, permit: SlotPermit) -> None:
        self.replay.send_later(self, permit)

    def reject(self, error: GatewayError) -> None:
        self.replay.send_again(self, float(error.headers["retry-after-ms"]) / 1000)


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
        self._policy = site.policy
        self.apply_policy(len(site.policy.deployments) - bool(site.joins_at_seconds))
        self.fleet.on_slot_free = partial(on_free, self)
        self.scheduler: QueueScheduler[_ReplayedCall] = QueueScheduler(self.fleet)
        self.strategy = strategy
        self.peers = None if outbox is None else PeerReports(self.fleet, outbox)
        self.recheck_scheduled = False

    def apply_policy(self, deployments: int) -> None:
        """Load the policy with so many of its deployments."""
        self.fleet.apply(self._policy.model_copy(update={"deployments": self._policy.deployments[:deployments]}))
        self.deployments = self.fleet.deployments_of(self._policy.models[0])


class Replay:
    """Replays one trace through one strategy. Call `run` once."""

    def __init__(
        self,
        trace: TrafficTrace,
        site: SimulatedSite,
        make_strategy: Callable[[ActualEngine], Strategy],
        *,
        holds: bool,
        hints: bool = False,
        pooled: bool = False,
    ) -> None:
        """`make_strategy` gets the simulated engines, for baselines that read their caches or their load directly.

        `holds`: calls are held as the gateway does it, by the working set as far as the policy allows, and while a
        prefix is computed that they need too. `hints`: clients name their conversations. `pooled`: all engines share
        one cache of their total capacity, as the upper bound of routing.
        """
        self._trace = trace
        self._sessions = iter(trace.sessions)  # those that have not begun
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._event_numbers = count()
        self._call_numbers = count()
        self._now = 0.0
        self._policy = site.policy
        self._classes = {
            name: limits if holds else LatencyClass.model_validate({**limits.model_dump(), "hold": "off"})
            for name, limits in site.policy.classes.items()
        }
        self._holds = holds
        self._hints = hints
        self._timing = site.timing
        names = site.policy.models[0].deployments
        blocks = site.capacity_tokens // site.block_tokens
        # The cache of a deployment that joins later is no part of the pool until then.
        shared = EngineCache(blocks * (len(names) - bool(site.joins_at_seconds))) if pooled else None
        self._publishers = [EnginePublisher(site.block_tokens) for _ in names] if site.reports is Reports.EVENTS else []
        self._reports_cached = site.reports is not Reports.NOTHING
        self._engines = [
            SimulatedEngine(
                shared or EngineCache(blocks, self._publishers[index] if self._publishers else None),
                site.timing,
                speed=site.speeds[index] if site.speeds else 1.0,
                block_tokens=site.block_tokens,
            )
            for index in range(len(names))
        ]
        self._pool = shared
        by_name = dict(zip(names, self._engines, strict=True))
        self._gateways = [
            _Gateway(
                site,
                make_strategy(lambda deployment: by_name[deployment.name]),
                lambda gateway: self._serve(gateway, self._now),
            )
            for _ in range(site.gateways)
        ]
        self._attach_publishers()
        if site.joins_at_seconds:
            self._at(site.joins_at_seconds, self._join)
        for restart in site.restarts:
            self._at(restart.at_seconds, partial(self._restart, restart))
        self._requests_left = trace.requests
        self._block_tokens = site.block_tokens
        self._processors = site.processors
        self._share = 1.0  # of a processor, for each process that could use one
        self._on_the_way = 0  # requests between their client and an engine's scheduler
        self._gateways_in_turn = cycle(self._gateways)
        self._sync_scheduled = False
        self._calls: dict[EngineJob, _ReplayedCall] = {}  # in flight
        self._answer_blocks = count(-1, -1)  # of answers that no later prompt repeats
        self.result = ReplayResult(engines=self._engines)

    def run(self) -> ReplayResult:
        """Run all events and return the result."""
        for session in islice(self._sessions, self._trace.concurrency):
            self._at(session.starts_at_seconds, partial(self._arrive, session, 0))
        if self._publishers:
            self._at(METRICS_SECONDS, self._report_metrics)
        while self._events:
            self._now, _, action = heapq.heappop(self._events)
            action(self._now)
        assert not self._requests_left, "all requests end"
        self.result.learned_capacity_tokens = [
            deployment.cache.capacity_tokens for gateway in self._gateways for deployment in gateway.deployments
        ]
        return self.result

    def _at(self, when: float, action: Callable[[float], None]) -> None:
        heapq.heappush(self._events, (when, next(self._event_numbers), action))

    def _attach_publishers(self) -> None:
        for index in range(len(self._gateways[0].deployments)):
            if self._publishers and not self._publishers[index].is_attached:
                deployments = [gateway.deployments[index] for gateway in self._gateways]
                self._publishers[index].attach(deployments, self._engines[index])

    def _join(self, now: float) -> None:
        """Let the last deployment join. The pool, if there is one, grows by its cache."""
        if self._pool is not None:
            self._pool.capacity += self._pool.capacity // (len(self._engines) - 1)
        for gateway in self._gateways:
            gateway.apply_policy(len(self._engines))
        self._attach_publishers()

    def _restart(self, restart: Restart, now: float) -> None:
        engine = self._engines[restart.deployment]
        engine.restart(now, restart.seconds)
        self._advance_later(restart.deployment)
        self._share_processors(now)

    def _arrive(self, session: TraceSession, turn: int, now: float) -> None:
        """A session's request arrives: it takes a slot now, or is queued."""
        request = session.requests[turn]
        class_name = "realtime" if session.urgent else "batch"
        call = SimulatedCall(
            request.chain,
            request.prompt_tokens,
            session.name if self._hints else None,
            self._classes[class_name],
            class_name,
            self._policy.models[0],
            self._classes[class_name].is_background,
        )
        gateway = next(self._gateways_in_turn)
        prompt = request.engine or EnginePrompt(request.prompt_tokens, call.fingerprint)
        record = ReplayedRequest(session.urgent, prompt.tokens, now, request.output_tokens)
        answer = self._answer_chain(session, turn, prompt)
        name = str(next(self._call_numbers))
        job = EngineJob(prompt.chain, prompt.tokens, request.output_tokens, answer, name)
        replayed = _ReplayedCall(self, gateway, session, turn, call, record, job)
        self._request_slot(replayed, now)

    def _request_slot(self, replayed: _ReplayedCall, now: float) -> None:
        gateway = replayed.gateway
        permit = gateway.scheduler.take_now(replayed.call, now)
        if permit is not None:
            self._send(replayed, permit, now)
        else:
            gateway.scheduler.add(replayed, now)
            self._serve(gateway, now)

    def _answer_chain(self, session: TraceSession, turn: int, prompt: EnginePrompt) -> tuple[int, ...]:
        """The blocks that an answer completes: those of the next prompt if it repeats the answer, or else new ones."""
        output_tokens, chain = max(1, session.requests[turn].output_tokens), prompt.chain
        missing = (prompt.tokens + output_tokens - 1) // self._block_tokens - len(chain)
        known: tuple[int, ...] = ()
        if missing > 0 and chain and turn + 1 < len(session.requests) and self._trace.answers_repeat:
            following = session.requests[turn + 1].chain
            if len(following) > len(chain) and following[len(chain) - 1] == chain[-1]:
                known = following[len(chain) : len(chain) + missing]
        return (*known, *islice(self._answer_blocks, max(0, missing - len(known))))

    def _serve(self, gateway: _Gateway, now: float) -> None:
        gateway.scheduler.grant_free_slots(now)
        if gateway.scheduler.has_held_calls and not gateway.recheck_scheduled:
            gateway.recheck_scheduled = True
            at = max(now, min(now + HELD_RECHECK_SECONDS, gateway.scheduler.next_hold_end))
            self._at(at, partial(self._recheck_held, gateway))

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

    def send_again(self, replayed: _ReplayedCall, seconds: float) -> None:
        """The queue was full: the client tries again after so many seconds."""
        replayed.record.rejections += 1
        self._at(self._now + seconds, partial(self._request_slot, replayed))

    def send_later(self, replayed: _ReplayedCall, permit: SlotPermit) -> None:
        """A queued request got a slot. It is sent after the current event, as a task would be woken."""
        self._at(self._now, partial(self._send, replayed, permit))

    def _send(self, replayed: _ReplayedCall, permit: SlotPermit, now: float) -> None:
        """What the router does, and then what the engine does."""
        call, gateway = replayed.call, replayed.gateway
        candidates = gateway.strategy.order(call, gateway.deployments, now)
        candidate = next(one for one in candidates if permit.move_to(one.deployment))
        deployment = candidate.deployment
        replayed.permit = permit
        shared, source = None, with_block_source(call.fingerprint, candidate, candidates, now).block_source
        if source is not None:
            replayed.load = _Load(source)
            shared = find_source_prefill(call, source.deployment, now)
        if shared is None and self._holds:
            shared = find_shared_prefill(call, deployment, now)
        if shared is None:
            self._send_to(deployment, replayed, now)
        else:  # whichever comes first: the end of that prefill, or of the wait
            deployment.estimate.waiting_for_prefix += 1
            replayed.waits_for_prefix = True
            shared.prompt.on_prefilled.append(lambda: self._at(self._now, partial(self._send_to, deployment, replayed)))
            self._at(now + shared.wait_seconds, partial(self._send_to, deployment, replayed))

    def _send_to(self, deployment: DeploymentState, replayed: _ReplayedCall, now: float) -> None:
        if replayed.sent is not None:
            return
        if replayed.waits_for_prefix:
            deployment.estimate.waiting_for_prefix -= 1
        call, gateway = replayed.call, replayed.gateway
        replayed.sent = deployment.send(call, now)
        if (load := replayed.load) is not None:
            source, prediction = load.source.deployment, load.source.prediction
            assert prediction is not None
            kept_tokens = replayed.sent.expect_loaded(source, prediction.matched, moves=True)
            load.kept_blocks = None if kept_tokens is None else -(-kept_tokens // self._block_tokens)
        record = replayed.record
        record.sent, record.deployment = now, gateway.deployments.index(deployment)
        record.predicted_tokens = replayed.sent.prompt.prediction.matched * BLOCK_TOKENS
        self._calls[replayed.job] = replayed
        if self._timing.wait > 0:
            self._at(now + self._timing.wait, partial(self._set_out, record.deployment, replayed))
        else:
            self._set_out(record.deployment, replayed, now)
        self._schedule_sync(gateway, now)

    def _set_out(self, index: int, replayed: _ReplayedCall, now: float) -> None:
        seconds = self._timing.request + self._timing.request_token * replayed.job.prompt_tokens
        self._compute_for(seconds, partial(self._load, index, replayed), now)

    def _compute_for(self, seconds: float, then: Callable[[float], None], now: float) -> None:
        """Use a processor for so many seconds, beside the engines' steps."""
        if seconds <= 0:
            then(now)
            return
        self._on_the_way += 1
        self._share_processors(now)
        self._at(now + seconds / self._share, partial(self._computed, then))

    def _computed(self, then: Callable[[float], None], now: float) -> None:
        self._on_the_way -= 1
        then(now)
        self._share_processors(now)

    def _load(self, index: int, replayed: _ReplayedCall, now: float) -> None:
        """Load the blocks that the engine lacks and the other one has, if any, and then submit the request."""
        job, load = replayed.job, replayed.load
        if load is not None:
            source = replayed.gateway.deployments.index(load.source.deployment)
            chain = job.chain[: (job.prompt_tokens - 1) // self._block_tokens]
            held, own = (self._engines[one].cache.match(chain) for one in (source, index))
            if held > own:
                seconds = self._timing.load + self._timing.load_token * (held - own) * self._block_tokens
                then = partial(self._loaded, index, source, job, chain[:held], load.kept_blocks)
                self._compute_for(seconds, then, now)
                return
        self._submit(index, job, now)

    def _loaded(
        self, index: int, source: int, job: EngineJob, chain: Sequence[int], kept_blocks: int | None, now: float
    ) -> None:
        cache = self._engines[index].cache
        if (table := cache.allocate(chain, len(chain))) is not None:
            cache.publish(table, chain, job.session)
            cache.free(table)
            if kept_blocks is not None:
                self._engines[source].cache.drop(chain, kept_blocks)
            self._publish_later(index, now)
            self._publish_later(source, now)
        self._submit(index, job, now)

    def _publish_later(self, index: int, now: float) -> None:
        if self._publishers and self._publishers[index].has_events:
            self._at(now + EVENTS_SECONDS, self._publishers[index].publish)

    def _submit(self, index: int, job: EngineJob, now: float) -> None:
        self._engines[index].submit(job, now)
        self._advance_later(index)

    def _advance_later(self, index: int) -> None:
        if (at := self._engines[index].next_event_at) < math.inf:
            self._at(at, partial(self._advance, index))

    def _advance(self, index: int, now: float) -> None:
        """The engine completes steps, unless a request that arrived meanwhile has changed their time."""
        engine = self._engines[index]
        if now != engine.next_event_at:
            return
        for job, is_first, is_end in engine.advance(now):
            if is_first:
                self._first_chunk(self._calls[job], now)
            if is_end:
                self._finish(self._calls.pop(job), now)
        self._advance_later(index)
        self._share_processors(now)
        self._publish_later(index, now)

    def _share_processors(self, now: float) -> None:
        """Divide the processors among the engines that compute, the chunks that they send, and requests on the way.

        A request keeps the speed with which it set out, since it is soon there.
        """
        if self._processors is None:
            return
        used = self._on_the_way + sum(engine.processors_used for engine in self._engines)
        self._share = self._processors / max(self._processors, used)
        for index, engine in enumerate(self._engines):
            before = engine.next_event_at
            engine.set_share(self._share, now)
            if engine.next_event_at != before:
                self._advance_later(index)

    def _report_metrics(self, now: float) -> None:
        for publisher in self._publishers:
            if publisher.is_attached:
                publisher.report_metrics(now)
        if self._requests_left:
            self._at(now + METRICS_SECONDS, self._report_metrics)

    def _first_chunk(self, replayed: _ReplayedCall, now: float) -> None:
        replayed.record.first_chunk, replayed.record.cached_tokens = now, replayed.job.cached_tokens
        assert replayed.sent is not None
        replayed.sent.first_chunk(now)
        self._schedule_sync(replayed.gateway, now)

    def _finish(self, replayed: _ReplayedCall, now: float) -> None:
        record, session, turn = replayed.record, replayed.session, replayed.turn + 1
        assert replayed.sent is not None and replayed.permit is not None
        record.finished = now
        cached_tokens = record.cached_tokens if self._reports_cached else 0
        replayed.sent.learn_cached(record.prompt_tokens, cached_tokens)
        replayed.sent.learn_usage(replayed.job.session, record.prompt_tokens, cached_tokens, record.output_tokens)
        replayed.sent.end(now)
        self._schedule_sync(replayed.gateway, now)
        self.result.requests.append(record)
        self._requests_left -= 1
        if turn < len(session.requests):
            self._at(now + session.requests[turn].after_seconds, partial(self._arrive, session, turn))
        elif (following := next(self._sessions, None)) is not None:
            self._at(now, partial(self._arrive, following, 0))
        replayed.permit.release()  # gives the slot to a queued request
