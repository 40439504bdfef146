"""What the parts of the house say of themselves in /metrics, asked for when somebody looks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from gateway.batches import Batches
from gateway.billing.ledger import Ledger
from gateway.billing.reconciliation import Reconciliation
from gateway.deployments.circuit_breaker import STATES
from gateway.deployments.engine_reports import Reports
from gateway.deployments.fleet import Fleet
from gateway.deployments.replica_sync import PeerReports
from gateway.limits.limiter import Limiter
from gateway.limits.local_share import OutageFallback
from gateway.policy.file import PolicyHolder
from gateway.response_store import ResponseStore
from gateway.serve import Components
from gateway.telemetry.watched import (
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
    RESPONSES_KEPT,
    STORE_FAILURES,
    Reading,
    Watched,
)

Watch = Callable[[Watched, Callable[[], Reading]], None]


def show_calls(watch: Watch, components: Components, policies: PolicyHolder, in_flight: Callable[[], int]) -> None:
    watch(INFLIGHT, in_flight)
    watch(BODIES, lambda: components.bodies.held_bytes)
    watch(QUEUE_DEPTH, lambda: {(name,): components.queue.depth(name) for name in policies.current.classes})
    watch(QUEUE_GAVE_WAY, lambda: {(name,): components.queue.gave_way(name) for name in policies.current.classes})
    watch(CUT_STREAMS, lambda: {(result,): count for result, count in components.router.cut_streams.items()})


def show_deployments(watch: Watch, fleet: Fleet) -> None:
    watch(
        DEPLOYMENT_BREAKER,
        lambda: {
            (deployment.name, state): float(deployment.breaker.state(_now()) == state)
            for deployment in fleet
            for state in STATES
        },
    )
    watch(DEPLOYMENT_INFLIGHT, lambda: {(deployment.name,): deployment.in_flight for deployment in fleet})
    watch(
        DEPLOYMENT_AVAILABLE,
        lambda: {(deployment.name,): float(not deployment.cooling(_now())) for deployment in fleet},
    )


def show_reports(watch: Watch, fleet: Fleet, reports: Reports) -> None:
    """What servers tell of themselves."""
    watch(
        KV_EVENT_BATCHES,
        lambda: {
            (deployment.name, kind): getattr(reporting.counts, kind)
            for deployment, reporting in reports
            if deployment.blocks is not None
            for kind in ("batches", "gaps", "malformed")
        },
    )
    watch(
        KV_BLOCKS,
        lambda: {(deployment.name,): len(deployment.blocks) for deployment in fleet if deployment.blocks is not None},
    )
    watch(
        KV_CALLS,
        lambda: {
            (deployment.name, known): count
            for deployment in fleet
            if (blocks := deployment.blocks) is not None
            for known, count in (
                ("known", blocks.calls_attributed), ("unknown", blocks.calls_ended - blocks.calls_attributed)
            )
        },
    )  # fmt: skip
    watch(
        DEPLOYMENT_REPORTED,
        lambda: {
            (deployment.name, what): getattr(load, what)
            for deployment in fleet
            if (load := deployment.estimate.load) is not None
            for what in ("running", "waiting", "kv_usage")
        },
    )


def show_sharing(watch: Watch, peers: PeerReports) -> None:
    watch(GATEWAYS_HEARD, lambda: peers.others)
    watch(CALLS_HEARD, lambda: peers.calls_heard)


def show_limits(watch: Watch, limiter: Limiter, counters: OutageFallback) -> None:
    watch(LIMITS_LOST, lambda: {("lease",): limiter.leases_lost, ("settlement",): limiter.settlements_dropped})
    watch(LIMITS_UNSETTLED, lambda: limiter.unsettled)
    watch(STORE_FAILURES, lambda: limiter.store_failures)
    watch(LIMITS_LOCAL, lambda: float(counters.is_away))
    watch(LIMITS_LOCAL_CALLS, lambda: {("granted",): counters.granted_here, ("refused",): counters.refused_here})
    watch(LIMITS_UNTOLD, lambda: counters.untold)


def show_ledger(watch: Watch, ledger: Ledger, reconciliation: Reconciliation) -> None:
    watch(LEDGER_ROWS, lambda: ledger.receipts_written)
    watch(LEDGER_DRIFT, lambda: reconciliation.drift)
    watch(LEDGER_OK, lambda: float(ledger.ok))


def show_batches(watch: Watch, batches: Batches) -> None:
    watch(BATCHES, lambda: {(status,): count for status, count in batches.counts().items()})
    watch(BATCHES_ENDED, lambda: {(status,): count for status, count in batches.ended().items()})
    watch(BATCH_LINES, lambda: {(state,): count for state, count in batches.lines().items()})


def show_stored_responses(watch: Watch, response_store: ResponseStore) -> None:
    watch(RESPONSES_KEPT, lambda: {(outcome,): count for outcome, count in response_store.outcomes.items()})


def _now() -> float:
    return asyncio.get_running_loop().time()
