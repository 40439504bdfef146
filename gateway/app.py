"""The composition root: builds the long-lived parts once and gives each the others that it needs.

It alone knows every concrete class. The doors are bare ASGI callables; Starlette is the shell around them, for what
is asked for seldom.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import logging
import time
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from gateway.admin import Admin
from gateway.auth import Authenticator
from gateway.batches import Batches
from gateway.batches.inside import AtBatchClass, KeyById
from gateway.breaker import STATES
from gateway.cache import ResponseCache
from gateway.canonicaliser import Canonicaliser, new_call_id
from gateway.diagnosis import Journal, Watcher
from gateway.doors import COUNTING_DOORS, DOORS, catalogue, messages
from gateway.doors.base import Door
from gateway.errors import GatewayError, LedgerUnavailable, NotFound, StorageUnavailable
from gateway.fleet import Fleet
from gateway.health import HealthChecks
from gateway.keyring import Keyring
from gateway.ledger import Ledger
from gateway.ledger.compacting import Compactor
from gateway.ledger.retention import drop_old_segments
from gateway.ledger.shipping import Shipper
from gateway.limits import LIMITS
from gateway.limits.limiter import Limiter
from gateway.limits.local_share import StoreOrShare
from gateway.limits.report import what_is_left
from gateway.policy import Policy
from gateway.policy_file import PolicyHolder
from gateway.prompt_counts import PromptCounts
from gateway.providers import make_provider
from gateway.queueing import Queue
from gateway.reconciliation import Reconciliation
from gateway.recovery import Recovery
from gateway.replies import BodyRoom
from gateway.reports import Reports
from gateway.routing import STRATEGIES
from gateway.routing.router import Router
from gateway.serve import House, Story, handle, serve
from gateway.settings import Settings, resolve_secret
from gateway.settler import Settler
from gateway.sharing import Hearsay, Sharing, untold
from gateway.shell import CALL_ID, EXCEPTION_HANDLERS, json_reply
from gateway.siblings import ALONE, Seat, Siblings, left_behind
from gateway.storage import open_storage
from gateway.storage.memory import MemoryStorage
from gateway.telemetry import (
    BATCH_LINES,
    BATCHES,
    BATCHES_ENDED,
    BODIES,
    CALLS_HEARD,
    CUT_STREAMS,
    DEPLOYMENT_AVAILABLE,
    DEPLOYMENT_BREAKER,
    DEPLOYMENT_INFLIGHT,
    DEPLOYMENT_REPORTED,
    GATEWAYS_HEARD,
    INFLIGHT,
    KV_BLOCKS,
    KV_CALLS,
    KV_EVENT_BATCHES,
    LEDGER_DRIFT,
    LEDGER_OK,
    LEDGER_ROWS,
    LIMITS_LOCAL,
    LIMITS_LOCAL_CALLS,
    LIMITS_LOST,
    LIMITS_UNSETTLED,
    LIMITS_UNTOLD,
    QUEUE_DEPTH,
    QUEUE_GAVE_WAY,
    STORE_FAILURES,
    Telemetry,
)
from gateway.transport import HTTPTransport

LAST_CALLS_SECONDS = 5.0  # for calls that were cut off by a shutdown to write their receipts

log = logging.getLogger("warmpath")


class Gateway:
    """The ASGI application. `policies` holds a valid policy already; everything else is opened in its lifespan.

    `seat` is its own among the workers that share a machine; `settings.replica` is then a name of its own, too.
    """

    def __init__(self, settings: Settings, policies: PolicyHolder, seat: Seat = ALONE) -> None:
        self._policies = policies
        self._seat = seat
        self._machine = settings.replica
        if seat.count > 1:
            settings = settings.model_copy(update={"replica": seat.name(settings.replica)})
        self._storage = open_storage(settings.storage, owner=settings.replica)
        self._counters = StoreOrShare(self._storage, MemoryStorage, lambda: policies.current.storage_outage)
        self._transport = HTTPTransport(connect_timeout_seconds=settings.upstream_connect_seconds)
        told = untold() if self._storage.has_others else None
        self._fleet = Fleet(
            lambda deployment: make_provider(deployment, self._transport, resolve_secret), seat.share_of, told
        )
        self._hearsay = None if told is None else Hearsay(self._fleet, told)
        self._reports = Reports(self._fleet, self._transport, resolve_secret)
        self._telemetry = Telemetry(
            settings.otlp_endpoint, replica=settings.replica, otlp_headers=settings.otlp_headers
        )
        self._siblings = Siblings(seat, lambda: self._telemetry.render_metrics()[0])
        self._created = int(time.time())
        self._in_flight = 0
        self._quiet = asyncio.Event()  # set when no call is in flight any more
        self._leaving = False
        self._draining = False
        self._ledger_dir = settings.ledger_dir
        self._ledger = Ledger(settings.ledger_dir, settings.replica, keep_days=settings.ledger_keep_days)
        self._ship_to = settings.ledger_ship
        self._keep_days = settings.ledger_keep_days
        self._compacts = settings.ledger_compact
        self._replica = settings.replica
        # Memory is never away.
        limiter = Limiter(self._storage if isinstance(self._storage, MemoryStorage) else self._counters, LIMITS)
        pepper = settings.key_pepper.get_secret_value()
        authenticator = Authenticator(self._storage, pepper)
        self._recovery = Recovery(self._ledger, self._fleet, policies, limiter, authenticator)
        self.house = House(
            policies=policies,
            authenticator=authenticator,
            canonicaliser=Canonicaliser(pepper.encode(), self._storage),
            cache=ResponseCache(self._storage),
            limiter=limiter,
            queue=Queue(self._fleet),
            router=Router(self._fleet, STRATEGIES),
            ledger=self._ledger,
            settler=Settler(limiter, self._ledger, in_vain=self._recovery.add),
            telemetry=self._telemetry,
            diagnosis=Watcher(Journal(settings.data_dir / "diagnosis", settings.replica)),
            max_body_bytes=settings.max_body_bytes,
            bodies=BodyRoom(settings.max_bodies_bytes),
        )
        self._reconciliation = Reconciliation(
            self._fleet,
            settings.ledger_dir / settings.replica,
            every_seconds=settings.reconcile_seconds,
            leads=seat.number == 0,
        )
        self._batches = Batches(
            settings,
            self.house,
            authenticator=KeyById(self._storage, pepper),
            canonicaliser=AtBatchClass(pepper.encode(), self._storage),
        )
        counting = PromptCounts(self._fleet)
        self._doors: dict[str, tuple[Door, Story]] = {
            **{f"/v1/{door.path}": (door, serve) for door in DOORS},
            **{f"/v1/{door.path}": (door, counting.count) for door in COUNTING_DOORS},
        }
        self._shell = self._make_shell()
        # On a listener of its own, where settings give it one; `routes` is where further ones are mounted.
        self.admin = Admin(
            policies=policies,
            key=settings.admin_key,
            keyring=Keyring(self._storage, pepper),
            limits_of=lambda tenant, keys: what_is_left(tenant, keys, LIMITS, self._counters, now=time.time()),
            state=self._state,
            routes=_usage_routes(settings),
        )
        self._take_over(policies.current)
        policies.subscribe(self._take_over, refused=self._telemetry.policy_rejected)
        self._show_numbers()

    def _make_shell(self) -> Starlette:
        """All that is no call of a model."""
        shell = Starlette(
            routes=[
                *(Route(path, _post_only, methods=["POST"]) for path in self._doors),  # any other method: 405
                *self._batches.routes,
                Route("/v1/responses/{id}", self._response, methods=["GET", "DELETE"]),
                Route("/v1/models", self._models),
                Route("/v1/models/{name:path}", self._model),
                Route("/health", self._health),
                Route("/ready", self._ready),
                Route("/metrics", self._metrics),
            ],
            exception_handlers=EXCEPTION_HANDLERS,
        )
        shell.router.redirect_slashes = False  # a redirect would name whatever host the client made up
        return shell

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        asked = self._doors.get(scope["path"]) if scope["type"] == "http" and scope["method"] == "POST" else None
        if asked is None:
            if scope["type"] == "lifespan":
                await self._live(receive, send)
            else:
                await self._shell(scope, receive, self._named(scope, send))
            return
        self._in_flight += 1
        try:
            door, story = asked
            await handle(self.house, door, scope, receive, send, story=story)
        except asyncio.CancelledError:
            if not self._draining:
                raise
            # The server's patience is over. The client has been told, and the call is settled: no more to be said.
        finally:
            self._in_flight -= 1
            if not self._in_flight:
                self._quiet.set()

    def leave(self) -> None:
        """Readiness goes off, and calls are still taken from whoever has not heard of that. No line of a batch is
        begun."""
        self._leaving = True
        self._batches.drain()

    def drain(self) -> None:
        """No new calls: whoever waits is refused; what is under way goes on."""
        self.leave()
        self._draining = True
        self.house.queue.close()

    def _take_over(self, policy: Policy) -> None:
        self._fleet.apply(policy)
        self._telemetry.policy_loaded(policy)

    async def _live(self, receive: Receive, send: Send) -> None:
        """The ASGI lifespan. What stands against a start is told in one line; only a bug shows its trace."""
        await receive()
        try:
            opened = await self._open()
        except (GatewayError, OSError) as error:
            await send({"type": "lifespan.startup.failed", "message": f"the gateway can not start: {error}"})
            return
        async with opened:
            await send({"type": "lifespan.startup.complete"})
            await receive()
        await send({"type": "lifespan.shutdown.complete"})

    async def _open(self) -> contextlib.AsyncExitStack:
        """Everything that is opened at the start, to be closed in reverse."""
        async with contextlib.AsyncExitStack() as opened:
            await self._storage.open()
            opened.push_async_callback(self._storage.close)
            opened.push_async_callback(self.house.canonicaliser.close)
            opened.callback(self.house.diagnosis.close)
            self._ledger.open()
            opened.push_async_callback(self._ledger.close)
            self._recovery.take_over()
            await self._telemetry.start()
            opened.push_async_callback(self._telemetry.shutdown)
            await self._siblings.start()
            opened.push_async_callback(self._siblings.stop)
            await self._counters.start()
            opened.push_async_callback(self._counters.stop)
            await self.house.limiter.start()
            opened.push_async_callback(self.house.limiter.stop)
            opened.push_async_callback(self.house.settler.stop)
            opened.push_async_callback(self._transport.aclose)
            await self._batches.open()
            opened.push_async_callback(self._batches.close)
            recovering = asyncio.create_task(self._recover(), name="ledger recovery")
            recovering.add_done_callback(_tell_why_it_ended)
            opened.push_async_callback(_end, recovering)
            if self._ship_to is not None:
                shipper = Shipper(self._ship_to, self._ledger, self._replica)
                shipping = asyncio.create_task(shipper.run(), name="ledger shipping")
                shipping.add_done_callback(_tell_why_it_ended)
                opened.push_async_callback(_end, shipping)
            if self._compacts:
                compacting = asyncio.create_task(Compactor(self._ledger).run(), name="ledger compaction")
                compacting.add_done_callback(_tell_why_it_ended)
                opened.push_async_callback(_end, compacting)
            watching = asyncio.create_task(self._policies.watch(), name="policy watch")
            watching.add_done_callback(_tell_why_it_ended)
            opened.push_async_callback(_end, watching)
            if self._hearsay is not None:
                sharing = asyncio.create_task(Sharing(self._hearsay, self._storage).run(), name="sharing")
                sharing.add_done_callback(_tell_why_it_ended)
                opened.push_async_callback(_end, sharing)
            reporting = asyncio.create_task(self._reports.run(), name="reports")
            reporting.add_done_callback(_tell_why_it_ended)
            opened.push_async_callback(_end, reporting)
            noting = asyncio.create_task(self._reconciliation.run(), name="reconciliation")
            noting.add_done_callback(_tell_why_it_ended)
            opened.push_async_callback(_end, noting)
            checking = asyncio.create_task(HealthChecks(self._fleet).run(), name="health checks")
            checking.add_done_callback(_tell_why_it_ended)
            opened.push_async_callback(_end, checking)
            opened.push_async_callback(self._last_calls)
            return opened.pop_all()

    async def _recover(self) -> None:
        """For ever; beside it, the chains of workers that there are no more are wound up."""
        async with asyncio.TaskGroup() as tasks:
            for name in left_behind(self._ledger_dir, self._machine, self._seat) if self._seat.number == 0 else ():
                tasks.create_task(self._wind_up(name), name=f"winding up {name}")
            await self._recovery.run()

    async def _wind_up(self, name: str) -> None:
        """What nobody does any more for this chain: close its calls, ship its rows, let it age, compact it."""
        try:
            async with Ledger(self._ledger_dir, name) as ledger:
                recovery = Recovery(ledger, self._fleet, self._policies, self.house.limiter, self.house.authenticator)
                recovery.take_over()
                await recovery.catch_up()
                await ledger.durable(hurry=True)
                if self._ship_to is not None:
                    await Shipper(self._ship_to, ledger, name).run(for_ever=False)
                if self._keep_days is not None:
                    oldest = time.time() - self._keep_days * 86_400
                    await asyncio.to_thread(drop_old_segments, ledger.folder, oldest, ledger.may_remove)
                if self._compacts:
                    await Compactor(ledger).catch_up()
        except LedgerUnavailable:
            pass  # another gateway is writing it
        except OSError as error:
            log.warning("the ledger of %s stays as it is until the next start: %s", name, error)

    async def _last_calls(self) -> None:
        """Those that the server cut off at the end of its patience still settle, into what is closed next."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LAST_CALLS_SECONDS):
                while self._in_flight:
                    self._quiet.clear()
                    await self._quiet.wait()

    def _show_numbers(self) -> None:
        house, limiter, watch = self.house, self.house.limiter, self._telemetry.watch
        watch(INFLIGHT, lambda: self._in_flight)
        watch(BODIES, lambda: house.bodies.held_bytes)
        watch(QUEUE_DEPTH, lambda: {(name,): house.queue.depth(name) for name in self._policies.current.classes})
        watch(QUEUE_GAVE_WAY, lambda: {(name,): house.queue.gave_way(name) for name in self._policies.current.classes})
        watch(CUT_STREAMS, lambda: {(result,): count for result, count in house.router.cut_streams.items()})
        watch(
            DEPLOYMENT_BREAKER,
            lambda: {
                (server.name, state): float(server.breaker.state(_loop_time()) == state)
                for server in self._fleet
                for state in STATES
            },
        )
        watch(DEPLOYMENT_INFLIGHT, lambda: {(server.name,): server.in_flight for server in self._fleet})
        watch(
            DEPLOYMENT_AVAILABLE,
            lambda: {(server.name,): float(not server.cooling(_loop_time())) for server in self._fleet},
        )
        self._show_reports()
        self._show_batches()
        if (hearsay := self._hearsay) is not None:
            watch(GATEWAYS_HEARD, lambda: hearsay.others)
            watch(CALLS_HEARD, lambda: hearsay.calls_heard)
        watch(LIMITS_LOST, lambda: {("lease",): limiter.leases_lost, ("settlement",): limiter.settlements_dropped})
        watch(LIMITS_UNSETTLED, lambda: limiter.unsettled)
        watch(STORE_FAILURES, lambda: limiter.store_failures)
        shared = self._counters
        watch(LIMITS_LOCAL, lambda: float(shared.is_away))
        watch(LIMITS_LOCAL_CALLS, lambda: {("granted",): shared.granted_here, ("refused",): shared.refused_here})
        watch(LIMITS_UNTOLD, lambda: shared.untold)
        watch(LEDGER_ROWS, lambda: self._ledger.receipts_written)
        watch(LEDGER_DRIFT, lambda: self._reconciliation.drift)
        watch(LEDGER_OK, lambda: float(self._ledger.ok))

    def _show_batches(self) -> None:
        batches, watch = self._batches, self._telemetry.watch
        watch(BATCHES, lambda: {(status,): count for status, count in batches.counts().items()})
        watch(BATCHES_ENDED, lambda: {(status,): count for status, count in batches.ended().items()})
        watch(BATCH_LINES, lambda: {(state,): count for state, count in batches.lines().items()})

    def _show_reports(self) -> None:
        reports, watch = self._reports, self._telemetry.watch
        watch(
            KV_EVENT_BATCHES,
            lambda: {
                (server.name, kind): getattr(reporting.counts, kind)
                for server, reporting in reports
                if server.blocks is not None
                for kind in ("batches", "gaps", "malformed")
            },
        )
        watch(KV_BLOCKS, lambda: {(s.name,): len(s.blocks) for s in self._fleet if s.blocks is not None})
        watch(
            KV_CALLS,
            lambda: {
                (server.name, known): count
                for server in self._fleet
                if (blocks := server.blocks) is not None
                for known, count in (
                    ("known", blocks.calls_attributed), ("unknown", blocks.calls_ended - blocks.calls_attributed)
                )
            },
        )  # fmt: skip
        watch(
            DEPLOYMENT_REPORTED,
            lambda: {
                (server.name, what): getattr(load, what)
                for server in self._fleet
                if (load := server.estimate.load) is not None
                for what in ("running", "waiting", "kv_usage")
            },
        )

    # The shell: what is asked for seldom.

    def _named(self, scope: Scope, send: Send) -> Send:
        """Every reply has the ids that a client can quote; what is asked for here makes no spans of its own."""
        trace = self._telemetry.begin(scope["headers"], sample=0.0)
        call_id = scope[CALL_ID] = new_call_id()
        names = [(b"x-request-id", call_id.encode()), (b"x-trace-id", b"%032x" % trace.trace_id)]
        if scope["type"] == "http" and messages.asked_for_in(scope):
            names.append((b"request-id", call_id.encode()))

        async def send_named(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message["headers"], *names]}
            await send(message)

        return send_named

    async def _models(self, request: Request) -> Response:
        policy = self._policies.current
        principal = await self.house.authenticator.authenticate(dict(request.scope["headers"]), policy)
        if messages.asked_for_in(request.scope):
            return json_reply(200, messages.models(policy, principal, self._created, request.query_params))
        return json_reply(200, catalogue.listing(policy, principal, self._created))

    async def _model(self, request: Request) -> Response:
        policy = self._policies.current
        principal = await self.house.authenticator.authenticate(dict(request.scope["headers"]), policy)
        entry = messages.model if messages.asked_for_in(request.scope) else catalogue.entry
        return json_reply(200, entry(policy, principal, self._created, request.path_params["name"]))

    async def _response(self, request: Request) -> Response:
        await self.house.authenticator.authenticate(dict(request.scope["headers"]), self._policies.current)
        raise NotFound(f"there is no response {request.path_params['id'][:100]!r}: none are kept here")

    async def _health(self, _: Request) -> Response:
        """Alive: the event loop answers."""
        return json_reply(200, {"status": "ok"})

    async def _ready(self, _: Request) -> Response:
        """Whether calls should be sent here, and what stands against it."""
        state = await self._state()
        return json_reply(503 if state["faults"] else 200, state)

    async def _state(self) -> dict[str, Any]:
        """Says nothing about other machines' health: a gateway whose servers are down must go on to answer, with the
        truth."""
        faults = []
        if self._leaving:
            faults.append("the gateway is shutting down")
        if not self._ledger.ok:
            faults.append("the ledger can not be written")
        try:
            await self._storage.get("ready")
        except StorageUnavailable as error:
            if self._policies.current.storage_outage.limits == "refuse":
                faults.append(error.message)
        servers = {server.name: not server.cooling(_loop_time()) for server in self._fleet}
        return {
            "status": "ready" if not faults else "not ready",
            "faults": faults,
            "deployments": servers,
            "policy": self._policies.current.hash,
        }

    async def _metrics(self, _: Request) -> Response:
        own, content_type = self._telemetry.render_metrics()
        return Response(await self._siblings.metrics(own), headers={"content-type": content_type})


def _usage_routes(settings: Settings) -> list[Route]:
    """Those bring DuckDB with them: only a gateway that has an admin API pays for it."""
    if settings.admin_port is None:
        return []
    routes: list[Route] = importlib.import_module("gateway.admin.usage").usage_routes(settings.ledger_dir)
    return routes


def _loop_time() -> float:
    return asyncio.get_running_loop().time()


async def _post_only(request: Request) -> Response:
    raise AssertionError("what is posted to a door does not come here")


async def _end(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.wait([task])


def _tell_why_it_ended(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.critical("%s has ended: no change is seen until a restart", task.get_name(), exc_info=error)
