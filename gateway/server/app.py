"""The gateway as an ASGI application: dispatch by path, lifespan, draining and readiness.

`gateway.serve.handle` answers POST requests to an endpoint. `gateway.server.probes`, a Starlette application, answers
all other requests. The lifespan opens the components that `gateway.server.composition` has built, and closes them in
reverse order.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from starlette.types import Receive, Scope, Send

from gateway.auth.key_ids import KeyIdAuthenticator
from gateway.auth.pepper import ANOTHER_PEPPER, PepperCheck
from gateway.billing.budget_rebuild import BudgetRebuild
from gateway.billing.drift_monitor import DriftMonitor
from gateway.billing.ledger import make_shipper
from gateway.billing.ledger.compactor import Compactor
from gateway.core.errors import GatewayError, LedgerUnavailable, StorageUnavailable
from gateway.core.supervision import Work
from gateway.deployments.engine_reports import EngineReports
from gateway.deployments.health_checks import HealthChecks
from gateway.deployments.replica_sync import ReplicaSync
from gateway.endpoints.conversations import ConversationsApi
from gateway.endpoints.stored_chats_api import StoredChatsApi
from gateway.endpoints.stored_responses import StoredResponsesApi
from gateway.limits.budget_warnings import BudgetWarnings
from gateway.policy import Policy
from gateway.policy.file import PolicyHolder
from gateway.policy.history import record
from gateway.providers import make_provider
from gateway.serve import handle
from gateway.server import gauges
from gateway.server.composition import (
    build_admin,
    build_background,
    build_batches,
    build_components,
    build_endpoints,
    build_listed_endpoints,
    build_parts,
)
from gateway.server.cors import with_cors
from gateway.server.departed_workers import DepartedWorkers
from gateway.server.probes import Probes
from gateway.server.secret_refresh import SecretRefresh
from gateway.server.worker_group import SINGLE_WORKER, WorkerIdentity, left_behind
from gateway.settings import Settings, resolve_secret
from gateway.telemetry.history import HistoryRecorder, Load

LAST_ROWS_SECONDS = 5.0  # how long a shutdown tries to ship the ledger's last rows
LAST_CALLS_SECONDS = 5.0  # how long calls that a shutdown cut off have to write their receipts

log = logging.getLogger("warmpath")


class Gateway:
    """The ASGI application of one gateway process.

    `policies` already has a valid policy. Everything else is opened in the lifespan. `worker` identifies this process
    among the worker processes of the gateway.
    """

    def __init__(self, settings: Settings, policies: PolicyHolder, worker: WorkerIdentity = SINGLE_WORKER) -> None:
        parts = self._parts = build_parts(settings, policies, worker)
        settings = parts.settings
        self.components = build_components(parts)
        self._by_key_id = replace(
            self.components, authenticator=KeyIdAuthenticator(parts.storage, parts.pepper, parts.directory)
        )
        self._background = build_background(parts, self.components)
        self._endpoints = build_endpoints(parts, self._background)
        self._batches = build_batches(parts, self.components)
        self.admin = build_admin(
            parts,
            self.components,
            state=self._state,
            handle=self._handle_by_key_id,
            routes=self._batches.operator_routes,
        )
        self.supervisor = parts.supervisor
        self._engine_reports = EngineReports(parts.fleet, parts.transport, resolve_secret, parts.supervisor)
        self._budget_warnings = BudgetWarnings(
            policies,
            parts.counters,
            resolve_secret,
            settings.data_dir / "budget-warnings",
            parts.tenants.all,
            slices=parts.limiter.slices,
        )
        self._budget_rebuild = BudgetRebuild(
            parts.records, parts.limiter, parts.authenticator, policies, settings.ledger_dir,
            settings.data_dir / "storage-id", machine=parts.machine,
        )  # fmt: skip
        self._drift_monitor = DriftMonitor(
            parts.fleet,
            settings.ledger_dir / settings.replica,
            every_seconds=settings.reconcile_seconds,
            leads=parts.is_first_worker,
        )
        ship = settings.ledger_ship
        self._shipper = None if ship is None else make_shipper(ship, parts.ledger, settings.replica)
        stored = StoredResponsesApi(parts.authenticator, policies, parts.response_store, self._background)
        conversations = ConversationsApi(parts.authenticator, policies, parts.response_store)
        chats = StoredChatsApi(parts.authenticator, policies, parts.response_store)
        self._probes = Probes(
            policies, parts.authenticator, parts.telemetry, parts.worker_group, self._state,
            endpoints=self._endpoints,
            routes=[*self._batches.routes, *stored.routes(), *conversations.routes(), *chats.routes()],
        )  # fmt: skip
        self._in_flight = 0
        self._idle = asyncio.Event()  # set when the last call in flight ends
        self._leaving = False
        self._draining = False
        self._drains_until: float | None = None  # in event-loop seconds; set when the drain begins
        self._apply(policies.current)
        policies.subscribe(self._apply, refused=parts.telemetry.policy_rejected)
        self._register_gauges()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._entry(scope, receive, send)

    async def _handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        found = None
        if scope["type"] == "http" and scope["method"] == "POST":
            found = self._endpoints.get(scope["path"]) or self._listed.get(scope["path"])
        if found is None:
            if scope["type"] == "lifespan":
                await self._lifespan(receive, send)
            else:
                await self._probes(scope, receive, send)
            return
        self._in_flight += 1
        try:
            endpoint, story = found
            await handle(self.components, endpoint, scope, receive, send, story=story)
        except asyncio.CancelledError:
            if not self._draining:
                raise
            # The drain time is over. The client got an error and the call is settled, so the cancellation ends here.
        finally:
            self._in_flight -= 1
            if not self._in_flight:
                self._idle.set()

    async def _handle_by_key_id(self, path: str, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request of the dashboard's playground to the endpoint with this path."""
        endpoint, story = self._endpoints[f"/v1/{path}"]
        self._in_flight += 1
        try:
            await handle(self._by_key_id, endpoint, scope, receive, send, story=story)
        finally:
            self._in_flight -= 1
            if not self._in_flight:
                self._idle.set()

    def leave(self) -> None:
        """Begin the lame-duck phase: report not ready, but accept calls, since load balancers react late.

        No more batch lines are started.
        """
        self._leaving = True
        self._batches.drain()

    def drain(self) -> None:
        """Accept no new calls and reject the queued ones. Calls in flight continue."""
        self.leave()
        if self._drains_until is None:
            self._drains_until = asyncio.get_running_loop().time() + self._parts.settings.drain_seconds
        self._draining = True
        self.components.queue.close()

    def _apply(self, policy: Policy) -> None:
        self._parts.fleet.apply(policy)
        self._parts.discovery.apply(policy)
        try:
            record(policy, self._parts.settings.data_dir / "policies")
        except OSError as error:
            log.error("policy %s not recorded in the history, for `warmpath prices check`: %s", policy.hash, error)
        self._listed = build_listed_endpoints(self._parts, policy)
        self._entry = with_cors(self._handle, policy.cors)
        self._parts.telemetry.policy_loaded(policy)

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        """Run the ASGI lifespan. Reports a known reason for a failed start in one line, and a bug with its stack."""
        await receive()
        try:
            opened = await self._open()
        except (GatewayError, OSError) as error:
            await send({"type": "lifespan.startup.failed", "message": f"the gateway cannot start: {error}"})
            return
        async with opened:
            await send({"type": "lifespan.startup.complete"})
            await receive()
        await send({"type": "lifespan.shutdown.complete"})

    async def _open(self) -> contextlib.AsyncExitStack:
        """Open all components in order. The returned stack closes them in reverse order."""
        parts, components = self._parts, self.components
        async with contextlib.AsyncExitStack() as opened:
            await parts.storage.open()
            opened.push_async_callback(parts.storage.close)
            await self._check_pepper()
            opened.push_async_callback(components.canonicaliser.close)
            opened.push_async_callback(parts.response_store.close)
            opened.callback(components.diagnosis.close)
            await parts.records.try_to_refresh()
            if parts.settings.admin_port is not None:
                parts.audit.open()
                if parts.is_first_worker:
                    note = partial(parts.audit.note, "policy in force", actor="the policy file")
                    parts.policies.subscribe(lambda policy: note(target=policy.hash))
                opened.push_async_callback(parts.audit.close)
            parts.ledger.open()
            opened.push_async_callback(parts.ledger.close)
            opened.push_async_callback(self._ship_last_rows)
            parts.recovery.take_over()
            await parts.telemetry.start()
            opened.push_async_callback(parts.telemetry.shutdown)
            await parts.worker_group.start()
            opened.push_async_callback(parts.worker_group.stop)
            await parts.counters.start()
            opened.push_async_callback(parts.counters.stop)
            if parts.limiter.slices is not None:
                await parts.limiter.slices.start()
                opened.push_async_callback(parts.limiter.slices.stop)
            await parts.limiter.start()
            opened.push_async_callback(parts.limiter.stop)
            opened.push_async_callback(components.settler.stop)
            opened.push_async_callback(parts.transport.aclose)
            opened.push_async_callback(components.mirroring.close)
            await self._batches.open()
            opened.push_async_callback(self._batches.close)
            for name, work in self._background_work():
                opened.push_async_callback(parts.supervisor.start(name, work).cancel)
            opened.push_async_callback(self._last_calls)
            opened.push_async_callback(self._drain_background)
            return opened.pop_all()

    async def _check_pepper(self) -> None:
        """Warn if the storage's keys were made with another pepper. No error, since all keys may be in the policy."""
        if not self._parts.is_first_worker:
            return
        check = PepperCheck(self._parts.storage, self._parts.pepper)
        with contextlib.suppress(StorageUnavailable):  # the gateway may start without it
            if not await check.agrees():
                log.warning(
                    "%s: they are not valid here. Set it to the value they were made with; "
                    "to change it for good, see `warmpath keys change-pepper --help`",
                    ANOTHER_PEPPER,
                )

    def _background_work(self) -> Iterator[tuple[str, Work]]:
        """The work that runs as long as the gateway, by the name of its task.

        The first worker also finishes the ledger chains of workers that no longer exist.
        """
        parts, settings = self._parts, self._parts.settings
        yield "ledger recovery", parts.recovery.run
        departed = DepartedWorkers(parts.settings, parts.fleet, parts.policies, parts.limiter, parts.authenticator)
        for name in left_behind(settings.ledger_dir, parts.machine, parts.worker) if parts.is_first_worker else ():
            yield f"departed worker {name}", partial(departed.finish, name)
        if self._shipper is not None:
            yield "ledger shipping", self._shipper.run
        if settings.ledger_compact:
            yield "ledger compaction", Compactor(parts.ledger).run
        yield "policy watch", parts.policies.watch
        yield "tenants and admin keys", parts.records.run
        yield "discovery", parts.discovery.run
        if parts.peers is not None:
            yield "replica sync", ReplicaSync(parts.peers, parts.storage).run
        yield "engine reports", self._engine_reports.run
        if parts.is_first_worker:
            yield "budget warnings", self._budget_warnings.run
            if parts.limiter.slices is not None:
                yield "rebuilding of budgets", self._budget_rebuild.run
        yield "reconciliation", self._drift_monitor.run
        if settings.admin_port is not None:
            yield "history", HistoryRecorder(
                parts.history_folder, str(parts.worker.number), parts.recent.sums,
                load=self._load, storage_timeouts=lambda: parts.limiter.storage_failures,
            ).run  # fmt: skip
            yield "last uses of keys", parts.last_uses.run
        make = partial(make_provider, transport=parts.transport, resolve_secret=resolve_secret)
        yield "secret refresh", SecretRefresh(parts.fleet, resolve_secret, make).run
        yield "health checks", HealthChecks(parts.fleet).run

    async def _last_calls(self) -> None:
        """Wait until the calls that the shutdown cut off are settled. Runs before any component is closed."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LAST_CALLS_SECONDS):
                while self._in_flight:
                    self._idle.clear()
                    await self._idle.wait()

    async def _drain_background(self) -> None:
        """Let responses in the background end within what is left of the drain time. Then cut them off."""
        drains_until = self._drains_until or 0.0
        await self._background.close(max(0.0, drains_until - asyncio.get_running_loop().time()))

    async def _ship_last_rows(self) -> None:
        """Ship the rows of the last calls, because the disk of a pod may not outlive it."""
        if self._shipper is None:
            return
        try:
            async with asyncio.timeout(LAST_ROWS_SECONDS):
                await self._parts.ledger.durable(flush_now=True)
                await self._shipper.run(forever=False)
        except (TimeoutError, LedgerUnavailable):
            log.warning("the last ledger rows are not shipped; the next start with this ledger ships them")

    def _register_gauges(self) -> None:
        parts, components, register = self._parts, self.components, self._parts.telemetry.register
        gauges.show_calls(register, components, parts.policies, lambda: self._in_flight)
        gauges.show_deployments(register, parts.fleet)
        gauges.show_discovery(register, parts.discovery)
        gauges.show_reports(register, parts.fleet, self._engine_reports)
        if parts.peers is not None:
            gauges.show_sharing(register, parts.peers)
        gauges.show_limits(register, parts.limiter, parts.counters, components.settler)
        gauges.show_budgets(register, self._budget_warnings)
        gauges.show_ledger(register, parts.ledger, self._drift_monitor, self._shipper)
        gauges.show_batches(register, self._batches)
        gauges.show_tasks(register, parts.supervisor)
        gauges.show_stored_responses(register, parts.response_store)
        gauges.show_idempotency(register, parts.idempotency)
        gauges.show_mirroring(register, components.mirroring)
        gauges.show_hooks(register, components.hooks)

    def _load(self) -> Load:
        """What is in flight and queued in this worker, for the history."""
        parts, queued = self._parts, self.components.queue.scheduler
        return Load(
            self._in_flight,
            {name: queued.depth(name) for name in parts.policies.current.classes},
            {deployment.name: deployment.in_flight for deployment in parts.fleet},
        )

    async def _state(self) -> dict[str, Any]:
        """Return the content of /ready. `faults` has only faults of the gateway itself.

        Failing deployments are no fault of the gateway, which must then still answer calls with errors. `tasks_down`
        has all background tasks that keep failing. Only those without which no call can be served are faults.
        """
        parts, faults = self._parts, []
        if self._leaving:
            faults.append("the gateway is shutting down")
        if not parts.ledger.ok:
            faults.append("the ledger cannot be written")
        faults += [f"the background task {name!r} keeps failing" for name in parts.supervisor.essential_down()]
        try:
            await parts.storage.get("ready")
        except StorageUnavailable as error:
            if parts.policies.current.storage_outage.limits == "refuse":
                faults.append(error.message)
        faults += [f"the source of {name!r} has not been read yet" for name in parts.discovery.unread()]
        now = asyncio.get_running_loop().time()
        return {
            "status": "ready" if not faults else "not ready",
            "faults": faults,
            "deployments": {deployment.name: not deployment.is_deprioritised(now) for deployment in parts.fleet},
            "unavailable": {
                deployment.name: reason for deployment in parts.fleet if (reason := deployment.unavailable_reason)
            },
            "discovery": parts.discovery.state(),
            "draining": parts.fleet.departed.draining(),
            "tasks_down": parts.supervisor.down(),
            "policy": parts.policies.current.hash,
        }
