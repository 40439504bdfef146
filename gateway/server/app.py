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
from collections.abc import Coroutine, Iterator
from typing import Any

from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from gateway.admin import Admin
from gateway.admin.diagnosis import DiagnosisEndpoint
from gateway.admin.responses import response_routes
from gateway.admin.views import view_routes
from gateway.auth.authenticator import Authenticator
from gateway.auth.keyring import Keyring
from gateway.auth.pepper import ANOTHER_PEPPER, PepperCheck
from gateway.batches import BatchService
from gateway.batches.line_call import BatchCanonicaliser, KeyIdAuthenticator
from gateway.billing.drift_monitor import DriftMonitor
from gateway.billing.ledger import Ledger
from gateway.billing.ledger.compactor import Compactor
from gateway.billing.ledger.shipper import Shipper
from gateway.billing.open_calls import LedgerCallLog
from gateway.billing.recovery import Recovery
from gateway.billing.settler import Settler
from gateway.core.errors import GatewayError, StorageUnavailable
from gateway.deployments.engine_reports import EngineReports
from gateway.deployments.fleet import Fleet
from gateway.deployments.health_checks import HealthChecks
from gateway.deployments.replica_sync import PeerReports, ReplicaSync, new_outbox
from gateway.diagnosis import DiagnosisJournal, PrefixDiagnosis
from gateway.endpoints import COUNTING_ENDPOINTS, ENDPOINTS
from gateway.endpoints.base import Endpoint
from gateway.endpoints.request_body import BodyBudget
from gateway.endpoints.stored_responses import StoredResponses
from gateway.limits import LIMITS
from gateway.limits.limiter import Limiter
from gateway.limits.outage_fallback import OutageFallback
from gateway.limits.report import remaining_limits
from gateway.policy import Policy
from gateway.policy.file import PolicyHolder
from gateway.prompts.canonicaliser import Canonicaliser
from gateway.providers import make_provider
from gateway.providers.transport import HTTPTransport
from gateway.queueing import Queue
from gateway.response_cache import ResponseCache
from gateway.response_store import ResponseStore
from gateway.routing import STRATEGIES
from gateway.routing.router import Router
from gateway.serve import Components, RequestHandler, handle, serve
from gateway.server import gauges
from gateway.server.departed_workers import DepartedWorkers
from gateway.server.probes import Probes
from gateway.server.worker_group import SINGLE_WORKER, WorkerGroup, WorkerIdentity, left_behind
from gateway.settings import Settings, resolve_secret
from gateway.storage import open_storage
from gateway.storage.memory import MemoryStorage
from gateway.telemetry import RecentCalls, Telemetry
from gateway.token_counting import TokenCounting

LAST_CALLS_SECONDS = 5.0  # for calls that were cut off by a shutdown to write their receipts

log = logging.getLogger("warmpath")


class Gateway:
    """The ASGI application. `policies` holds a valid policy already; everything else is opened in its lifespan.

    `worker` is its own among the workers that share a machine; `settings.replica` is then a name of its own, too.
    """

    def __init__(self, settings: Settings, policies: PolicyHolder, worker: WorkerIdentity = SINGLE_WORKER) -> None:
        self._policies = policies
        self._worker = worker
        self._machine = settings.replica
        if worker.count > 1:
            settings = settings.model_copy(update={"replica": worker.name(settings.replica)})
        self._storage = open_storage(settings.storage, owner=settings.replica)
        self._counters = OutageFallback(self._storage, MemoryStorage, lambda: policies.current.storage_outage)
        self._transport = HTTPTransport(connect_timeout_seconds=settings.upstream_connect_seconds)
        outbox = new_outbox() if self._storage.is_shared else None
        self._fleet = Fleet(
            lambda deployment: make_provider(deployment, self._transport, resolve_secret), worker.share_of, outbox
        )
        self._peers = None if outbox is None else PeerReports(self._fleet, outbox)
        self._reports = EngineReports(self._fleet, self._transport, resolve_secret)
        recent = RecentCalls(worker.number)
        self._telemetry = Telemetry(
            settings.otlp_endpoint,
            replica=settings.replica,
            otlp_headers=settings.otlp_headers,
            recent=None if settings.admin_port is None else recent,  # nobody else asks for them
        )
        self._worker_group = WorkerGroup(
            worker, metrics=lambda: self._telemetry.render_metrics()[0], calls=recent.answer
        )
        self._in_flight = 0
        self._quiet = asyncio.Event()  # set when no call is in flight any more
        self._leaving = False
        self._draining = False
        self._settings = settings
        self._ledger = Ledger(settings.ledger_dir, settings.replica, keep_days=settings.ledger_keep_days)
        # Memory is never away.
        limiter = Limiter(self._storage if isinstance(self._storage, MemoryStorage) else self._counters, LIMITS)
        summaries = settings.data_dir / "diagnosis"
        pepper = settings.key_pepper.get_secret_value()
        authenticator = Authenticator(self._storage, pepper)
        self._recovery = Recovery(self._ledger, self._fleet, policies, limiter, authenticator)
        self._departed_workers = DepartedWorkers(settings, self._fleet, policies, limiter, authenticator)
        bodies = BodyBudget(settings.max_bodies_bytes)
        self._response_store = ResponseStore(self._storage, bodies)
        self.components = Components(
            policies=policies,
            authenticator=authenticator,
            canonicaliser=Canonicaliser(pepper.encode(), self._storage, self._response_store),
            cache=ResponseCache(self._storage),
            limiter=limiter,
            queue=Queue(self._fleet),
            router=Router(self._fleet, STRATEGIES),
            call_log=LedgerCallLog(self._ledger, on_unbilled=self._recovery.add_unbilled),
            settler=Settler(limiter, self._ledger),
            telemetry=self._telemetry,
            diagnosis=PrefixDiagnosis(DiagnosisJournal(summaries, settings.replica)),
            max_body_bytes=settings.max_body_bytes,
            bodies=bodies,
        )
        self._reconciliation = DriftMonitor(
            self._fleet,
            settings.ledger_dir / settings.replica,
            every_seconds=settings.reconcile_seconds,
            leads=worker.number == 0,
        )
        self._batches = BatchService(
            settings,
            self.components,
            authenticator=KeyIdAuthenticator(self._storage, pepper),
            canonicaliser=BatchCanonicaliser(pepper.encode(), self._storage, self._response_store),
        )
        counting = TokenCounting(self._fleet)
        self._endpoints: dict[str, tuple[Endpoint, RequestHandler]] = {
            **{f"/v1/{endpoint.path}": (endpoint, serve) for endpoint in ENDPOINTS},
            **{f"/v1/{endpoint.path}": (endpoint, counting.count) for endpoint in COUNTING_ENDPOINTS},
        }
        kept = StoredResponses(authenticator, policies, self._response_store)
        self._probes = Probes(
            policies, authenticator, self._telemetry, self._worker_group, self._state,
            endpoints=self._endpoints, routes=[*self._batches.routes, *kept.routes()],
        )  # fmt: skip
        # On a listener of its own, where settings give it one; `routes` is where further ones are mounted.
        self.admin = Admin(
            policies=policies,
            key=settings.admin_key,
            keyring=Keyring(self._storage, pepper),
            limits_of=lambda tenant, keys: remaining_limits(tenant, keys, LIMITS, self._counters, now=time.time()),
            state=self._state,
            routes=[
                *view_routes(policies, self._telemetry, self._worker_group, trace_url=settings.trace_url),
                DiagnosisEndpoint(policies, summaries).route(),
                *response_routes(self._storage),
                *_usage_routes(settings),
            ],
        )
        self._take_over(policies.current)
        policies.subscribe(self._take_over, refused=self._telemetry.policy_rejected)
        self._show_numbers()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        asked = self._endpoints.get(scope["path"]) if scope["type"] == "http" and scope["method"] == "POST" else None
        if asked is None:
            if scope["type"] == "lifespan":
                await self._live(receive, send)
            else:
                await self._probes(scope, receive, send)
            return
        self._in_flight += 1
        try:
            endpoint, story = asked
            await handle(self.components, endpoint, scope, receive, send, story=story)
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
        self.components.queue.close()

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
            await self._check_pepper()
            opened.push_async_callback(self.components.canonicaliser.close)
            opened.callback(self.components.diagnosis.close)
            self._ledger.open()
            opened.push_async_callback(self._ledger.close)
            self._recovery.take_over()
            await self._telemetry.start()
            opened.push_async_callback(self._telemetry.shutdown)
            await self._worker_group.start()
            opened.push_async_callback(self._worker_group.stop)
            await self._counters.start()
            opened.push_async_callback(self._counters.stop)
            await self.components.limiter.start()
            opened.push_async_callback(self.components.limiter.stop)
            opened.push_async_callback(self.components.settler.stop)
            opened.push_async_callback(self._transport.aclose)
            await self._batches.open()
            opened.push_async_callback(self._batches.close)
            for name, work in self._standing_work():
                task = asyncio.create_task(work, name=name)
                task.add_done_callback(_tell_why_it_ended)
                opened.push_async_callback(_end, task)
            opened.push_async_callback(self._last_calls)
            return opened.pop_all()

    async def _check_pepper(self) -> None:
        """A warning and no more: keys of the policy may be all that is used. One worker speaks for all."""
        if self._worker.number != 0:
            return
        check = PepperCheck(self._storage, self._settings.key_pepper.get_secret_value())
        with contextlib.suppress(StorageUnavailable):  # which is no reason not to start
            if not await check.agrees():
                log.warning(
                    "%s: they are not valid here. Set it to what they are made with; "
                    "to change it for good, see `warmpath keys change-pepper --help`",
                    ANOTHER_PEPPER,
                )

    def _standing_work(self) -> Iterator[tuple[str, Coroutine[Any, Any, None]]]:
        """What goes on for as long as the gateway lives, beside the calls."""
        settings = self._settings
        yield "ledger recovery", self._recover()
        if settings.ledger_ship is not None:
            yield "ledger shipping", Shipper(settings.ledger_ship, self._ledger, settings.replica).run()
        if settings.ledger_compact:
            yield "ledger compaction", Compactor(self._ledger).run()
        yield "policy watch", self._policies.watch()
        if self._peers is not None:
            yield "sharing", ReplicaSync(self._peers, self._storage).run()
        yield "reports", self._reports.run()
        yield "reconciliation", self._reconciliation.run()
        yield "health checks", HealthChecks(self._fleet).run()

    async def _recover(self) -> None:
        """For ever; beside it, the chains of workers that there are no more are wound up."""
        gone = left_behind(self._settings.ledger_dir, self._machine, self._worker) if self._worker.number == 0 else []
        async with asyncio.TaskGroup() as tasks:
            for name in gone:
                tasks.create_task(self._departed_workers.wind_up(name), name=f"winding up {name}")
            await self._recovery.run()

    async def _last_calls(self) -> None:
        """Those that the server cut off at the end of its patience still settle, into what is closed next."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LAST_CALLS_SECONDS):
                while self._in_flight:
                    self._quiet.clear()
                    await self._quiet.wait()

    def _show_numbers(self) -> None:
        register, components = self._telemetry.register, self.components
        gauges.show_calls(register, components, self._policies, lambda: self._in_flight)
        gauges.show_deployments(register, self._fleet)
        gauges.show_reports(register, self._fleet, self._reports)
        if self._peers is not None:
            gauges.show_sharing(register, self._peers)
        gauges.show_limits(register, components.limiter, self._counters)
        gauges.show_ledger(register, self._ledger, self._reconciliation)
        gauges.show_batches(register, self._batches)
        gauges.show_stored_responses(register, self._response_store)

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
        now = asyncio.get_running_loop().time()
        deployments = {deployment.name: not deployment.is_deprioritised(now) for deployment in self._fleet}
        return {
            "status": "ready" if not faults else "not ready",
            "faults": faults,
            "deployments": deployments,
            "policy": self._policies.current.hash,
        }


def _usage_routes(settings: Settings) -> list[Route]:
    """Those bring DuckDB with them: only a gateway that has an admin API pays for it."""
    if settings.admin_port is None:
        return []
    routes: list[Route] = importlib.import_module("gateway.admin.usage").usage_routes(settings.ledger_dir)
    return routes


async def _end(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.wait([task])


def _tell_why_it_ended(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.critical("%s has ended: no change is seen until a restart", task.get_name(), exc_info=error)
