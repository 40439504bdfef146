"""Composition root: builds the long-lived components of a gateway process, and passes each one those that it needs.

Only this module knows every concrete class. `build_parts` builds the parts that several components share. The other
functions each build one group of components from these parts. This module opens no files or connections; the lifespan
in `gateway.server.app` does.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from starlette.routing import Route

from gateway.admin import Admin
from gateway.admin.diagnosis import DiagnosisEndpoint
from gateway.admin.history import HistoryEndpoint
from gateway.admin.requests import Handle, OperatorRequests
from gateway.admin.responses import response_routes
from gateway.admin.views import view_routes
from gateway.auth.admin_keys import AdminKeys
from gateway.auth.authenticator import Authenticator
from gateway.auth.key_ids import KeyIdAuthenticator
from gateway.auth.keyring import Keyring
from gateway.auth.last_uses import LastUses
from gateway.auth.records import RecordFeed
from gateway.auth.sessions import Sessions
from gateway.auth.tenant_directory import TenantDirectory
from gateway.auth.tenants import TenantRegistry
from gateway.background import BackgroundCanonicaliser, BackgroundService, events_space
from gateway.batches import BatchService
from gateway.batches.line_call import BatchCanonicaliser
from gateway.billing.audit import AuditLog
from gateway.billing.ledger import Ledger
from gateway.billing.open_calls import LedgerCallLog
from gateway.billing.recovery import CrashRecovery
from gateway.billing.settler import Settler
from gateway.core.supervision import Supervisor
from gateway.deployments.fleet import Fleet
from gateway.deployments.replica_sync import PeerReports, new_outbox
from gateway.diagnosis import DiagnosisJournal, PrefixDiagnosis
from gateway.discovery.discovery import Discovery
from gateway.endpoints import COUNTING_ENDPOINTS, ENDPOINTS, PASSED_ENDPOINTS, PassedEndpoint
from gateway.endpoints.base import Endpoint
from gateway.endpoints.request_body import BodyBudget
from gateway.endpoints.responses import ResponsesEndpoint
from gateway.hooks.runner import HookRunner
from gateway.idempotency import Idempotency, answers_space
from gateway.limits import LIMITS
from gateway.limits.limiter import Limiter
from gateway.limits.outage_fallback import OutageFallback
from gateway.limits.report import remaining_limits
from gateway.limits.slices import Slices
from gateway.mirroring import Mirroring
from gateway.policy import Policy
from gateway.policy.file import PolicyHolder
from gateway.prompts.canonicaliser import Canonicaliser
from gateway.providers import make_provider
from gateway.providers.media_fetch.fetcher import MediaFetcher
from gateway.providers.native_relay.relay import open_relay
from gateway.providers.transport import HTTPTransport
from gateway.queueing import Queue
from gateway.response_cache import ResponseCache
from gateway.response_store import ResponseStore, chats_space, conversations_space, threads_space
from gateway.routing import STRATEGIES
from gateway.routing.route_log import RouteLog
from gateway.routing.router import Router
from gateway.serve import Components, RequestHandler, serve
from gateway.server.worker_group import WorkerGroup, WorkerIdentity
from gateway.settings import Settings, resolve_secret
from gateway.storage import open_storage
from gateway.storage.base import Storage
from gateway.storage.memory import MemoryStorage
from gateway.telemetry import RecentCalls, Telemetry
from gateway.token_counting import TokenCounting


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts that several groups of components share. One instance per gateway process."""

    settings: Settings  # of this worker: its `replica` is this worker's own name
    machine: str  # the replica name that all workers of this gateway share
    worker: WorkerIdentity
    policies: PolicyHolder
    storage: Storage
    counters: OutageFallback  # the storage's counters, or local shares while it is unreachable
    transport: HTTPTransport
    fleet: Fleet
    discovery: Discovery
    peers: PeerReports | None  # None if no other gateway can share this storage
    telemetry: Telemetry
    recent: RecentCalls
    last_uses: LastUses
    worker_group: WorkerGroup
    ledger: Ledger
    limiter: Limiter
    authenticator: Authenticator
    records: RecordFeed
    tenants: TenantRegistry
    directory: TenantDirectory
    audit: AuditLog  # is opened only if there is an admin API
    recovery: CrashRecovery
    bodies: BodyBudget
    response_store: ResponseStore
    idempotency: Idempotency
    supervisor: Supervisor  # of all background tasks

    @property
    def pepper(self) -> str:
        return self.settings.key_pepper.get_secret_value()

    @property
    def history_folder(self) -> Path:
        """The folder of the dashboard's history, which all workers of this gateway share."""
        return self.settings.data_dir / "history" / self.machine

    @property
    def is_first_worker(self) -> bool:
        """Whether this is the first worker, which does the tasks that one worker does for all workers."""
        return self.worker.number == 0


def build_parts(settings: Settings, policies: PolicyHolder, worker: WorkerIdentity) -> Parts:
    """Build storage, deployments, telemetry, ledger and limits of one gateway process."""
    machine = settings.replica
    if worker.count > 1:
        settings = settings.model_copy(update={"replica": worker.name(machine)})
    supervisor = Supervisor()
    storage = open_storage(settings.storage, owner=settings.replica)
    counters = OutageFallback(storage, MemoryStorage, lambda: policies.current.storage_outage, supervisor=supervisor)
    transport = HTTPTransport(
        connect_timeout_seconds=settings.upstream_connect_seconds,
        relay=open_relay() if settings.native_relay else None,
    )
    outbox = new_outbox() if storage.is_shared else None
    make = partial(make_provider, transport=transport, resolve_secret=resolve_secret)
    fleet = Fleet(make, worker.share_of, outbox)
    recent = RecentCalls(worker.number)
    telemetry = _make_telemetry(settings, recent, supervisor)
    ledger = Ledger(settings.ledger_dir, settings.replica, keep_days=settings.ledger_keep_days, supervisor=supervisor)
    limiter = _make_limiter(storage, counters, settings.replica, ledger, supervisor)
    records = RecordFeed(storage)
    tenants = TenantDirectory(records)
    authenticator = Authenticator(storage, settings.key_pepper.get_secret_value(), tenants)
    bodies = BodyBudget(settings.max_bodies_bytes)
    return Parts(
        settings=settings,
        machine=machine,
        worker=worker,
        policies=policies,
        storage=storage,
        counters=counters,
        transport=transport,
        fleet=fleet,
        discovery=Discovery(fleet, transport, resolve_secret, make, supervisor),
        peers=None if outbox is None else PeerReports(fleet, outbox),
        telemetry=telemetry,
        recent=recent,
        last_uses=LastUses(storage, recent.sums.take_last_uses),
        worker_group=WorkerGroup(
            worker, metrics=lambda accept: telemetry.render_metrics(accept)[0], calls=recent.answer
        ),
        ledger=ledger,
        limiter=limiter,
        authenticator=authenticator,
        records=records,
        directory=tenants,
        tenants=TenantRegistry(records, tenants, lambda: policies.current),
        audit=AuditLog(settings.audit_dir, settings.replica, supervisor),
        recovery=CrashRecovery(ledger, fleet, policies, limiter, authenticator, owner=settings.replica),
        bodies=bodies,
        response_store=ResponseStore(storage, bodies),
        idempotency=Idempotency(storage),
        supervisor=supervisor,
    )


def _make_telemetry(settings: Settings, recent: RecentCalls, supervisor: Supervisor) -> Telemetry:
    return Telemetry(
        settings.otlp_endpoint,
        replica=settings.replica,
        otlp_headers=settings.otlp_headers,
        recent=None if settings.admin_port is None else recent,  # only the admin API reads them
        supervisor=supervisor,
        named_tenants=settings.metrics_tenants,
        otlp_metrics_seconds=settings.otlp_metrics_seconds,
    )


def _make_limiter(
    storage: Storage, counters: OutageFallback, replica: str, ledger: Ledger, supervisor: Supervisor
) -> Limiter:
    """The limiter, which admits calls from slices if the storage is shared."""
    slices = None
    if storage.is_shared:
        slices = Slices(
            counters, replica, replicas=lambda: counters.replicas, durable=ledger.durable,
            in_outage=lambda: counters.in_outage, supervisor=supervisor,
        )  # fmt: skip
    store = storage if isinstance(storage, MemoryStorage) else counters  # memory has no outages
    return Limiter(store, LIMITS, slices=slices, supervisor=supervisor)


def build_components(parts: Parts) -> Components:
    """Build the components that requests pass through."""
    media = MediaFetcher(parts.transport)
    route_log = RouteLog(parts.settings.data_dir / "routes", parts.settings.replica)
    return Components(
        policies=parts.policies,
        authenticator=parts.authenticator,
        canonicaliser=Canonicaliser(parts.pepper.encode(), parts.storage, parts.response_store),
        cache=ResponseCache(parts.storage),
        limiter=parts.limiter,
        queue=Queue(parts.fleet),
        router=Router(parts.fleet, STRATEGIES, route_log, media),
        call_log=LedgerCallLog(parts.ledger, on_unbilled=parts.recovery.add_unbilled),
        settler=Settler(parts.limiter, parts.ledger, parts.supervisor),
        telemetry=parts.telemetry,
        diagnosis=PrefixDiagnosis(
            DiagnosisJournal(_summaries(parts.settings), parts.settings.replica),
            lambda name: next((d.cache.capacity_tokens for d in parts.fleet if d.name == name), None),
        ),
        mirroring=Mirroring(parts.fleet, media),
        hooks=HookRunner(),
        max_body_bytes=parts.settings.max_body_bytes,
        bodies=parts.bodies,
    )


def build_background(parts: Parts, components: Components) -> BackgroundService:
    """Build what runs responses in the background. Its calls have time bounds of their own."""
    return BackgroundService(
        parts.storage,
        parts.response_store,
        parts.policies,
        BackgroundCanonicaliser(
            parts.pepper.encode(), parts.storage, parts.response_store, components.canonicaliser.media_calibration
        ),
    )


def build_endpoints(parts: Parts, background: BackgroundService) -> dict[str, tuple[Endpoint, RequestHandler]]:
    """Build the endpoints by path, each with the handler that answers its requests."""
    counting, answer_once = TokenCounting(parts.fleet), parts.idempotency.once(serve)
    return {
        **{f"/v1/{endpoint.path}": (endpoint, answer_once) for endpoint in ENDPOINTS},
        f"/v1/{ResponsesEndpoint.path}": (ResponsesEndpoint(), parts.idempotency.once(background.accept(serve))),
        **{f"/v1/{endpoint.path}": (endpoint, counting.count) for endpoint in COUNTING_ENDPOINTS},
        **{endpoint.client_path: (endpoint, answer_once) for endpoint in PASSED_ENDPOINTS},
    }


def build_listed_endpoints(parts: Parts, policy: Policy) -> dict[str, tuple[Endpoint, RequestHandler]]:
    """Build the endpoints for the paths that the policy lists, whose requests pass unchanged."""
    answer_once = parts.idempotency.once(serve)
    return {path: (PassedEndpoint(path, path), answer_once) for path in policy.passthrough}


def build_batches(parts: Parts, components: Components) -> BatchService:
    """Build the Batch API. Its lines are authenticated by key id and run in the latency class of batches."""
    return BatchService(
        parts.settings,
        components,
        authenticator=KeyIdAuthenticator(parts.storage, parts.pepper, parts.directory),
        canonicaliser=BatchCanonicaliser(
            parts.pepper.encode(), parts.storage, parts.response_store, components.canonicaliser.media_calibration
        ),
        supervisor=parts.supervisor,
    )


def build_admin(
    parts: Parts,
    components: Components,
    *,
    state: Callable[[], Awaitable[dict[str, Any]]],
    handle: Handle,
    routes: Sequence[Route],
) -> Admin:
    """Build the admin API, which has a separate listener.

    `state` returns the content of /ready, and `handle` runs a request of the playground. `routes` are further routes.
    """
    settings, counters, policies = parts.settings, parts.counters, parts.policies
    requests = OperatorRequests(
        policies, parts.authenticator, parts.fleet, components.router, parts.pepper.encode(), handle
    )
    return Admin(
        policies=policies,
        keys=AdminKeys(parts.records, parts.pepper, settings.admin_key),
        sessions=Sessions(
            lambda: policies.current, parts.records, resolve_secret, admin_key=settings.admin_key, pepper=parts.pepper
        ),
        keyring=Keyring(parts.storage, parts.pepper),
        tenants=parts.tenants,
        audit=parts.audit,
        audit_folder=settings.audit_dir,
        last_uses=parts.last_uses,
        limits_of=lambda tenant, keys, end_user: remaining_limits(
            tenant, keys, LIMITS, counters, now=time.time(), end_user=end_user
        ),
        state=state,
        routes=[
            *view_routes(
                policies, parts.telemetry, parts.worker_group, parts.tenants,
                trace_url=settings.trace_url, policy_folder=settings.data_dir / "policies",
            ),
            *HistoryEndpoint(parts.history_folder).routes(),
            *requests.routes(),
            *DiagnosisEndpoint(policies, _summaries(settings)).routes(),
            *response_routes(parts.storage, _spaces_of, parts.tenants),
            *_usage_routes(parts),
            *routes,
        ],
    )  # fmt: skip


def _spaces_of(tenant: str) -> tuple[str, ...]:
    """The names under which the storage has documents of a tenant."""
    kinds = (answers_space, events_space, conversations_space, chats_space, threads_space)
    return tenant, *(space(tenant) for space in kinds)


def _summaries(settings: Settings) -> Path:
    return settings.data_dir / "diagnosis"


def _usage_routes(parts: Parts) -> list[Route]:
    """Build the usage routes. Imports them here, only if there is an admin API, because they import DuckDB."""
    if parts.settings.admin_port is None:
        return []
    usage = importlib.import_module("gateway.admin.usage")
    routes: list[Route] = usage.usage_routes(parts.settings.ledger_dir, parts.tenants)
    return routes
